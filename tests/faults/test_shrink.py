"""Ranks that die while the others go on (behaviour 31). Needs Open MPI 5, whose launcher takes --with-ft ulfm."""

from __future__ import annotations

import math
import shlex
import time
from pathlib import Path
from unittest import mock

import pytest
from shrink_job import EPOCHS, STEPS_AN_EPOCH, Trained, has_ulfm, make_place, train, trained_once

from jobs import mpiexec, run_job
from mpidp.train.checkpoint.read import find_fault

# Jobs of four ranks, on machines of two cores.
pytestmark = [pytest.mark.library, pytest.mark.timeout(200)]
needs_ulfm = pytest.mark.skipif(
    not has_ulfm(), reason="the launcher is not Open MPI's: no user-level failure mitigation"
)
ALL_STEPS = set(range(1, EPOCHS * STEPS_AN_EPOCH + 1))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("shrink"))


@pytest.fixture(scope="module")
def untroubled(place: Path) -> Trained:
    """Two ranks, of which none dies."""
    trained = train(place, 2)
    assert trained.result.code == 0, trained.result.output
    assert trained_once(trained)
    return trained


def check(trained: Trained, untroubled: Trained, lost: list[list[int]]) -> None:
    """The run ended well, and did what one without losses does, but for the order in which numbers are added."""
    assert trained.result.code == 0, trained.result.output
    assert trained.lost == lost
    assert trained_once(trained)
    # A rank that dies between a step and its record takes what it knew of that step's loss with it.
    assert len(ALL_STEPS - set(trained.losses)) <= len(lost)
    for step, loss in trained.losses.items():
        assert loss == pytest.approx(untroubled.losses[step], rel=1e-4)
    assert [one["step"] for one in trained.validations] == [STEPS_AN_EPOCH * (epoch + 1) for epoch in range(EPOCHS)]
    for one, other in zip(trained.validations, untroubled.validations, strict=True):
        assert one["samples"] == other["samples"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


@needs_ulfm
@pytest.mark.parametrize(
    ("ranks", "kills", "lost"),
    [
        (2, "0:backward:3", [[0]]),
        (3, "2:forward:0 0:agree:17", [[2], [0]]),
        (4, "3:forward:2 0:reduce:5 1:optimizer:9", [[3], [0], [1]]),
        (4, "0:evaluate:6 1:checkpoint:12 3:agree:14", [[0], [1], [3]]),
        (4, "1:backward:3 2:backward:3 3:shrink:3", [[1, 2, 3]]),
        (4, "0:reduce:4 1:world:4 2:after:7", [[0, 1], [2]]),
    ],
)
def test_the_others_go_on(ranks: int, kills: str, lost: list[list[int]], place: Path, untroubled: Trained) -> None:
    """Behaviour 31: in every phase of a step, an evaluation, a checkpoint, a recovery; two at once; all but one."""
    trained = train(place, ranks, kills)
    if "shrink" in kills or "world" in kills:  # in one recovery or in two: whichever is noticed first
        lost = (
            [sorted(rank for of_loss in trained.lost for rank in of_loss)] if len(trained.lost) == 1 else trained.lost
        )
        assert sorted(rank for of_loss in trained.lost for rank in of_loss) == sorted(
            int(kill.split(":")[0]) for kill in kills.split()
        )
    check(trained, untroubled, lost)
    for of_loss in trained.of_losses:
        assert of_loss["lost_s"] >= 0
        assert all(one["host"] for one in of_loss["lost"])
    assert "mpidp: lost rank" in trained.result.output


@needs_ulfm
def test_what_follows_is_what_a_resume_on_fewer_ranks_does(place: Path) -> None:
    """Behaviour 31: bit for bit, from the step of the loss on."""
    words = ("--checkpoint.every-steps", "1", "--checkpoint.keep", "100", "--run.name", "bits")
    lost = train(place, 3, "1:forward:7", words)
    assert lost.result.code == 0, lost.result.output
    checkpoints = place / "runs" / "bits" / "checkpoints"
    for path in checkpoints.glob("step_*"):
        if int(path.name.split("_")[1]) > 7:
            path.rename(place / f"aside_{path.name}")
    resumed = train(place, 2, "", (*words, "--resume", "runs/bits"))
    assert resumed.result.code == 0, resumed.result.output
    assert {step: loss for step, loss in lost.losses.items() if step > 7} == {
        step: loss for step, loss in resumed.losses.items() if step > 7
    }
    assert lost.validations == resumed.validations


@needs_ulfm
@pytest.mark.parametrize(
    "words",
    [
        ("--data.mode", "store"),
        ("--data.mode", "node"),
        ("--data.mode", "stage"),
        ("--reduce.overlap", "on", "--reduce.reducer", "auto"),
        ("--reduce.comm_dtype", "bf16", "--reduce.error-feedback", "True", "--reduce.reducer", "node"),
    ],
    ids=lambda words: "-".join(words[1::2]),
)
def test_whatever_is_held_for_a_number_of_ranks_is_made_anew(words: tuple[str, ...], place: Path) -> None:
    """Behaviour 31: the data in memory, the helper thread and its communicators, the rounding errors."""
    trained = train(place, 3, "0:backward:8", words)
    assert trained.result.code == 0, trained.result.output
    assert trained.lost == [[0]]
    assert trained_once(trained)
    assert all(math.isfinite(loss) for loss in trained.losses.values())
    if "bf16" in words:
        assert "error feedback starts from nothing" in trained.result.output


@needs_ulfm
def test_too_few_are_left(place: Path) -> None:
    """Behaviour 31: the job ends, with the reason, as it would without fault tolerance."""
    trained = train(place, 2, "1:reduce:4", ("--train.min-ranks", "2"))
    assert trained.result.code == 1
    assert "only 1 rank left, and min_ranks is 2" in trained.result.output


def test_without_support_the_option_says_so(place: Path) -> None:
    """Behaviour 31: and the death of a rank ends the job, with whatever MPI there is."""
    trained = train(place, 2, "1:reduce:7", ulfm=False)
    assert trained.result.code != 0
    assert "training cannot go on without a rank that dies" in trained.result.output
    assert "--with-ft ulfm" in trained.result.output
    assert not trained.lost


@needs_ulfm
def test_those_that_are_left_can_be_asked_to_stop(place: Path) -> None:
    """Behaviours 31, 45: the channel of the request is made anew, and the exit code is that of a stop."""
    run = place / "runs" / "asked"

    def stop() -> None:
        start = time.monotonic()
        while time.monotonic() - start < 100:
            if (run / "metrics.jsonl").exists() and "loss_of_ranks" in (run / "metrics.jsonl").read_text():
                (run / "STOP").touch()
                return
            time.sleep(0.05)

    words = ("--run.name", "asked", "--train.epochs", "2000")
    trained = train(place, 3, "0:reduce:7", words, killer=stop)
    assert trained.result.code == 75, trained.result.output
    assert "stopped by the file STOP" in trained.result.output
    assert trained.lost == [[0]]
    assert all(max(rows.values()) == 1 for rows in trained.rows)


@needs_ulfm
def test_an_exception_still_ends_the_job(place: Path) -> None:
    """Behaviour 30: a rank with an error of its own is no loss to be survived; the others would meet it too."""
    trained = train(place, 2, "", ("--data.transform", "own:fails"))
    assert trained.result.code == 1
    assert "ZeroDivisionError" in trained.result.output
    assert "mpidp: lost" not in trained.result.output


MEET = """
import os, signal
import torch
import mpidp
world = mpidp.init()
elastic = mpidp.Elastic(world)
first = world.rank

def train(world):
    loader = mpidp.HDF5Loader("data.h5", fields=("x", "y"), global_batch=50, world=world)
    model = mpidp.DataParallel(torch.nn.Linear(9, 5), world)
    state = mpidp.TrainState(model, torch.optim.SGD(model.parameters(), lr=1e-4), loader)
    elastic.restore(state)
    while state.step < 50:
        if state.step == 5 and first == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.step == 5 and first == 1 and world.size == 3:
            world.node_comm.Barrier()  # fails, while rank 0 is in the agreement
        elastic.agree()
        state.step += 1
        assert world.comm.allgather(state.step) == [state.step] * world.size
    print("rank", first, "is rank", world.rank, "after", state.step, flush=True)

elastic.run(train)
"""


@needs_ulfm
def test_one_waits_in_the_agreement_when_another_has_noticed(place: Path) -> None:
    """Behaviour 31: the agreements of steps never meet those of the recovery."""
    ulfm = shlex.join([*mpiexec(3)[:-2], "--with-ft", "ulfm"])
    with mock.patch.dict("os.environ", {"MPIEXEC": ulfm}):
        result = run_job(["-c", MEET], 3, 120, cwd=place)
    assert result.code == 0, result.output
    assert "rank 0 is rank 0 after 50" in result.stdout
    assert "rank 1 is rank 1 after 50" in result.stdout


OWN_LOOP = """
import os, signal, sys
import torch
import torch.nn.functional as F
import mpidp
elastic = mpidp.Elastic(mpidp.init())
first, samples = elastic.world.rank, 0

def train(world):
    global samples
    loader = mpidp.HDF5Loader("data.h5", fields=("x", "y"), global_batch=50, seed=0, world=world)
    model = mpidp.DataParallel(torch.nn.Linear(9, 5), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    state = mpidp.TrainState(model, optimizer, loader)
    elastic.restore(state)
    while loader.epoch < 3:
        for batch in loader:
            loss = batch.weigh(F.cross_entropy(model(batch.x), batch.y))
            loss.backward()
            if first == 0 and state.step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            elastic.agree()
            optimizer.step()
            optimizer.zero_grad()
            state.step, samples = state.step + 1, samples + batch.global_size
    place = f"rank {world.rank} of {world.size}"
    print("rank", first, "is", place, "after", state.step, "steps,", samples, "samples", flush=True)

elastic.run(train)
"""


@needs_ulfm
def test_a_loop_of_ones_own_goes_on(place: Path) -> None:
    """Behaviour 31: the lines that docs/howto/fault_tolerance.md shows."""
    ulfm = shlex.join([*mpiexec(3)[:-2], "--with-ft", "ulfm"])
    with mock.patch.dict("os.environ", {"MPIEXEC": ulfm}):
        result = run_job(["-c", OWN_LOOP], 3, 120, cwd=place)
    assert result.code == 0, result.output
    assert "rank 1 is rank 0 of 2 after 12 steps, 600 samples" in result.stdout
    assert "rank 2 is rank 1 of 2 after 12 steps, 600 samples" in result.stdout


OWN_LOOP_THAT_SAVES = """
import os, signal
import torch
import torch.nn.functional as F
import mpidp
elastic = mpidp.Elastic(mpidp.init())
first = elastic.world.rank

def train(world):
    loader = mpidp.HDF5Loader("data.h5", fields=("x", "y"), global_batch=50, seed=0, world=world)
    model = mpidp.DataParallel(torch.nn.Linear(9, 5), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    state = mpidp.TrainState(model, optimizer, loader)
    with mpidp.Checkpoints("own_loop", state, every_steps=1, keep=99) as checkpoints:
        if not elastic.goes_on:
            checkpoints.resume()
        elastic.restore(state)
        while checkpoints.epoch < 3:
            for batch in loader:
                loss = batch.weigh(F.cross_entropy(model(batch.x), batch.y))
                loss.backward()
                if first == 0 and state.step == 5:
                    os.kill(os.getpid(), signal.SIGKILL)
                elastic.agree()
                optimizer.step()
                optimizer.zero_grad()
                checkpoints.step()
    print("rank", first, "has taken", state.step, "steps", flush=True)

elastic.run(train)
"""


@needs_ulfm
def test_a_loop_of_ones_own_goes_on_and_saves(place: Path) -> None:
    """Behaviours 31 and 41: the checkpoints' folder goes to the next rank 0, and to another job after this one."""
    ulfm = shlex.join([*mpiexec(3)[:-2], "--with-ft", "ulfm"])
    with mock.patch.dict("os.environ", {"MPIEXEC": ulfm}):
        result = run_job(["-c", OWN_LOOP_THAT_SAVES], 3, 120, cwd=place)
        assert result.code == 0, result.output
        assert all(f"rank {rank} has taken 12 steps" in result.stdout for rank in (1, 2))
        steps = {int(path.name.removeprefix("step_")) for path in (place / "own_loop").glob("step_*")}
        assert set(range(7, 13)) <= steps and all(
            find_fault(path) is None for path in (place / "own_loop").glob("step_*")
        )
        assert not (place / "own_loop/owner.json").exists()
        again = run_job(["-c", OWN_LOOP_THAT_SAVES], 2, 120, cwd=place)
    assert again.code == 0, again.output
    assert again.stdout.count("has taken 12 steps") == 2, again.output
