"""`mpidp.shares`: an ordinary DataLoader's batches, on one process and on ranks that are only pretended."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loaders import OneOf
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import mpidp
from mpidp.errors import DataError, MismatchError

N = 53


class Squares(Dataset[tuple[int, Tensor]]):
    """Sample i is (i, i²)."""

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        assert 0 <= index < N
        return index, torch.tensor(float(index**2))


def make(rank: int = 0, size: int = 1, global_batch: int = 10, **options: Any) -> mpidp.Shares:
    return mpidp.shares(options.pop("num_samples", N), global_batch, world=OneOf(rank, size), **options)  # type: ignore[arg-type]


def loader_of(shares: mpidp.Shares, **options: Any) -> DataLoader[Any]:
    return DataLoader(Squares(), batch_sampler=shares, **options)


def epoch_of(shares: mpidp.Shares, **options: Any) -> list[list[int]]:
    """The samples of each step of the rest of an epoch; what came with them is checked."""
    found = []
    for share, (x, y) in shares.steps(loader_of(shares, **options)):
        assert torch.equal(y, x.float() ** 2)
        assert len(x) == max(1, share.size) and share.fields == ()
        assert share.indices.tolist() == x[: share.size].tolist()
        found.append(share.indices.tolist())
    return found


@given(
    num_samples=st.integers(1, 40),
    global_batch=st.integers(1, 40),
    size=st.integers(1, 7),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
@settings(max_examples=60)
def test_the_same_global_batches_at_any_number_of_ranks(
    num_samples: int, global_batch: int, size: int, shuffle: bool, drop_last: bool
) -> None:
    """Behaviours 23 and 24: every sample once, equal numbers of steps, also where a rank has none; two epochs."""
    global_batch = min(global_batch, num_samples)
    options = {"num_samples": num_samples, "global_batch": global_batch, "shuffle": shuffle, "drop_last": drop_last}
    alone = make(**options)
    ranks = [make(rank, size, **options) for rank in range(size)]
    for epoch in range(2):
        expected = epoch_of(alone)
        assert len(expected) == len(alone)
        seen = [index for step in expected for index in step]
        assert len(set(seen)) == len(seen) == (num_samples // global_batch * global_batch if drop_last else num_samples)
        assert shuffle or seen == list(range(len(seen)))
        taken = [epoch_of(shares) for shares in ranks]
        assert [[index for part in step for index in part] for step in zip(*taken, strict=True)] == expected
        assert {shares.epoch for shares in ranks} == {epoch + 1}


def test_a_new_order_each_epoch_by_seed() -> None:
    """Behaviour 24."""
    shares, again = make(seed=3), make(seed=3)
    epochs = [epoch_of(shares) for _ in range(3)]
    assert len({str(epoch) for epoch in epochs}) == 3
    assert [epoch_of(again) for _ in range(3)] == epochs
    assert epoch_of(make(seed=4)) != epochs[0]


@pytest.mark.job
@pytest.mark.parametrize("workers", [0, 2])
def test_what_workers_fetched_ahead_is_not_counted(workers: int) -> None:
    """Behaviour 25: at each step, with another number of ranks and another global batch."""
    options = {"prefetch_factor": 3} if workers else {}
    shares = make()
    states, seen = [shares.state_dict()], [[]]
    for share, _ in shares.steps(loader_of(shares, num_workers=workers, **options)):
        seen.append(seen[-1] + share.indices.tolist())
        states.append(shares.state_dict())
    assert [state["position"] for state in states] == [0, 10, 20, 30, 40, 50, 53]
    for state, before in list(zip(states, seen, strict=True))[:-1]:
        rest: list[int] = []
        for rank in range(3):
            other = make(rank, 3, global_batch=7, seed=9)
            other.load_state_dict(state)
            found = epoch_of(other)
            assert len(found) == -(-(N - len(before)) // 7)
            rest += [index for step in found for index in step]
        assert sorted(before + rest) == list(range(N))
    behind = make()
    behind.load_state_dict(states[-1])  # nothing is left of that epoch, so the next one follows
    assert epoch_of(behind) == epoch_of(shares) and behind.epoch == 2


@pytest.mark.job
def test_workers_that_stay(caplog: pytest.LogCaptureFixture) -> None:
    """One DataLoader for all epochs, left in the middle of one."""
    shares, other = make(seed=1), make(seed=1)
    expected = [epoch_of(other) for _ in range(3)]
    loader = loader_of(shares, num_workers=1, persistent_workers=True)
    assert [share.indices.tolist() for share, _ in shares.steps(loader)] == expected[0]
    for (share, (x, _)), indices in zip(shares.steps(loader), expected[1][:2], strict=False):
        assert share.indices.tolist() == x.tolist() == indices
    assert not caplog.records
    assert [x.tolist() for _, (x, _) in shares.steps(loader)] == expected[1][3:]  # zip had taken one more
    assert "goes on behind the 30 of 53 samples of epoch 1" in caplog.text
    assert [x.tolist() for _, (x, _) in shares.steps(loader)] == expected[2]


def test_passes_that_broke_off(caplog: pytest.LogCaptureFixture) -> None:
    """In order of the data every pass begins at the start; restart does so for any."""
    plain = make(shuffle=False)
    next(plain.steps(loader_of(plain)))
    assert [index for step in epoch_of(plain) for index in step] == list(range(N)) and not caplog.records
    shares, expected = make(), epoch_of(make())
    next(shares.steps(loader_of(shares)))
    shares.restart()
    assert epoch_of(shares) == expected and not caplog.records
    first = shares.steps(loader_of(shares))
    next(first)
    next(shares.steps(loader_of(shares)))
    with pytest.raises(RuntimeError, match="another pass that began"):
        next(first)
    assert len(caplog.records) == 1


def test_shares_weigh_the_loss() -> None:
    """Behaviour 16: 3 samples on 5 ranks; those without have one that stands in, and has no weight."""
    total = 0.0
    sizes = []
    for rank in range(5):
        shares = make(rank, 5)
        for share, (x, _) in shares.steps(loader_of(shares)):
            if share.global_size == 3:
                sizes.append(share.size)
                total += share.weigh(x.double().mean()).item()
                last = share
    assert sorted(sizes) == [0, 0, 1, 1, 1] and last.global_size == 3
    expected = np.mean(epoch_of(make())[-1])
    assert total / 5 == pytest.approx(expected)


def test_a_loader_that_is_not_counted() -> None:
    shares = make()
    with pytest.raises(DataError, match=r"`for share, batch in shares\.steps\(loader\):`"):
        next(iter(loader_of(shares)))
    for other in (loader_of(make()), DataLoader(Squares(), 4), [1], loader_of(shares, num_workers=1, in_order=False)):
        with pytest.raises(DataError, match="another loader; give DataLoader"):
            next(shares.steps(other))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"num_samples": 9}, "num_samples = 9, and here it is 53"),
        ({"shuffle": "none"}, "shuffle = 'none', and here it is 'full'"),
        ({"position": 54}, "epoch 0, position 54"),
        ({"epoch": -1}, "epoch -1"),
    ],
)
def test_states_of_something_else(changed: dict[str, Any], text: str) -> None:
    """Behaviour 53."""
    shares = make()
    with pytest.raises(DataError, match=text):
        shares.load_state_dict({**shares.state_dict(), **changed})
    with pytest.raises(DataError, match="lacks epoch, global_batch"):
        shares.load_state_dict({})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"global_batch": 0}, "global_batch is 0, and there are 53"),
        ({"global_batch": 54}, "global_batch is 54, and there are 53"),
        ({"num_samples": 0}, "there are 0 samples"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_values_that_cannot_be(options: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        make(**options)


def test_ranks_must_agree() -> None:
    """Behaviour 33: both sides are named."""
    with pytest.raises(MismatchError, match=r"rank 1 made mpidp.shares with \(53, 10, 0, .*rank 0 with .*'other'"):
        mpidp.shares(N, 10, world=OneOf(1, 2, roots=(("other",), ())))  # type: ignore[arg-type]
