"""Ranks that die with a share of the optimizer's state, which another rank holds too (behaviours 21 and 31).

Needs Open MPI 5, whose launcher takes --with-ft ulfm.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
from shrink_job import EPOCHS, STEPS_AN_EPOCH, Trained, has_ulfm, make_place, train, trained_once

pytestmark = [
    pytest.mark.library,
    pytest.mark.timeout(200),  # jobs of four ranks, on machines of two cores
    pytest.mark.skipif(not has_ulfm(), reason="the launcher is not Open MPI's: no user-level failure mitigation"),
]
# Parameters larger than what is gathered at once, so that a death in the middle leaves some of them old.
WORDS = ("--optimizer.sharded", "True", "--model.arguments.width", "100000", "--optimizer.lr", "0.001")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("sharded"))


@pytest.fixture(scope="module")
def untroubled(place: Path) -> Trained:
    """Two ranks, of which none dies, and whose optimizers are plain."""
    trained = train(place, 2, "", WORDS[2:])
    assert trained.result.code == 0, trained.result.output
    return trained


@pytest.mark.parametrize(
    ("ranks", "kills", "lost"),
    [
        (2, "0:after:18", [[0]]),  # after the last step: nothing but the others' wait for parameters is left
        (3, "1:gather:4:2 2:optimizer:9", [[1], [2]]),
        (4, "3:reduce:2 0:gather:5:2 1:evaluate:12", [[3], [0], [1]]),
        (4, "2:gather:6:2 0:deal:6", [[2, 0]]),
        (4, "1:checkpoint:6 3:dealt:6", [[1, 3]]),
    ],
)
def test_the_others_go_on_with_the_whole_state(
    ranks: int, kills: str, lost: list[list[int]], place: Path, untroubled: Trained
) -> None:
    """The losses are those of a run in which nobody died, so the momentum that a dead rank kept is there."""
    trained = train(place, ranks, kills, WORDS)
    assert trained.result.code == 0, trained.result.output
    assert sorted(chain(*trained.lost)) == sorted(chain(*lost))
    assert trained_once(trained)
    for step, loss in trained.losses.items():
        assert loss == pytest.approx(untroubled.losses[step], rel=1e-4)
    assert [one["step"] for one in trained.validations] == [STEPS_AN_EPOCH * (epoch + 1) for epoch in range(EPOCHS)]
    assert trained.validations[-1]["loss"] == pytest.approx(untroubled.validations[-1]["loss"], rel=1e-4)


@pytest.mark.parametrize("kills", ["1:reduce:8 2:reduce:8", "0:reduce:8 1:reduce:8"])
def test_state_that_died_with_both_its_ranks_ends_the_job(place: Path, kills: str) -> None:
    """One message that says so, from whoever is the first rank now.

    No recovery ends without the other of the two, which dies as soon as it comes to this step.
    """
    trained = train(place, 4, kills, WORDS)
    text = trained.result.output
    assert trained.result.code == 1, text
    assert text.count("was held by lost ranks only") == 1
    assert "Start the job again: it goes on from its newest checkpoint." in text
