"""Behaviour 48: the trace is one that Perfetto can draw, with all ranks on one time axis; when off it does nothing."""

import dataclasses
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import mpidp
from mpidp.config import from_dict
from mpidp.train.records.trace import Trace
from mpidp.train.trainer import train
from mpidp.world.clock import rank_0_ns, read_clock
from mpidp.world.status import status
from mpidp.world.world import World

DIGITS = Path(__file__).parents[2] / "data" / "digits.h5"
PHASES = {"data", "forward", "backward", "reduce", "optimizer"}
FROM, STEPS = 3, 5


def spans_of(path: Path) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """The complete events by rank and thread, in the order of their begin; what the format asks of each is checked."""
    trace = json.loads(path.read_text())
    found: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["name"], str)
        assert event["ph"] in ("X", "M")
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0 and event["cat"] in ("step", "phase", "wait", "work")
            found[event["pid"], event["tid"]].append(event)
    return {key: sorted(events, key=lambda event: (event["ts"], -event["dur"])) for key, events in found.items()}


def assert_nested(events: list[dict[str, Any]]) -> None:
    """Spans of a thread lie side by side or one in the other: others Perfetto cannot draw on one track."""
    around: list[float] = []
    for event in events:
        stop = event["ts"] + event["dur"]
        while around and around[-1] <= event["ts"] + 1e-3:
            around.pop()
        assert not around or stop <= around[-1] + 1e-3, event
        around.append(stop)


def check_trace(path: Path, world: World, first_step: int) -> None:
    """Called on rank 0."""
    spans = spans_of(path)
    assert {rank for rank, _ in spans} == set(range(world.size))
    for events in spans.values():
        assert_nested(events)
    for rank in range(world.size):
        training = spans[rank, 0]
        steps = [event["name"] for event in training if event["cat"] == "step"]
        assert steps == [f"step {first_step + number}" for number in range(STEPS)]
        assert {event["name"] for event in training if event["cat"] == "phase"} >= PHASES
        if world.size > 1:
            assert any(event["cat"] == "wait" for event in training)
    reduces = [[event for event in spans[rank, 0] if event["name"] == "reduce"] for rank in range(world.size)]
    for together in zip(*reduces, strict=True):  # nobody is through a reduction before all have come to it
        assert max(event["ts"] for event in together) <= min(event["ts"] + event["dur"] for event in together)


@pytest.mark.mpi
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_run_traces_steps_of_all_ranks(world: World, mpi_tmp_path: Path, overlap: str) -> None:
    tables = {
        "run": {"folder": str(mpi_tmp_path)},
        "data": {"train": str(DIGITS), "validation_fraction": 0.2, "global_batch": 200},
        "model": {"name": "mlp"},
        "reduce": {"reducer": "flat", "overlap": overlap},
        "train": {"epochs": 2},
        "log": {"trace_from": FROM, "trace_steps": STEPS, "progress_s": 60.0},
    }
    train(from_dict(tables))
    if world.rank == 0:
        check_trace(mpi_tmp_path / "run" / "trace.json", world, FROM + 1)
    assert status.spans is None


@pytest.mark.mpi
def test_an_own_loop_traces(world: World, mpi_tmp_path: Path) -> None:
    """Without the trainer's words there are steps, forward, backward and the reduction; a short run has what it has."""
    model = mpidp.DataParallel(torch.nn.Linear(8, 4), world, reducer="flat")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="not negative"):
        mpidp.Trace(world, mpi_tmp_path / "wrong.json", steps=-1)
    trace = mpidp.Trace(world, mpi_tmp_path / "own.json", from_step=0, steps=9)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        trace.step()
    trace.close()
    trace.close()  # once more is no mistake
    model.unwrap()
    if world.rank == 0:
        spans = spans_of(mpi_tmp_path / "own.json")
        for rank in range(world.size):
            names = [event["name"] for event in spans[rank, 0]]
            assert sum(name.startswith("step ") for name in names) == 3
            assert names.count("forward") == 3 and names.count("reduce") == 3


@pytest.mark.mpi
def test_when_off_nothing_is_kept(world: World, mpi_tmp_path: Path) -> None:
    trace = Trace(world, mpi_tmp_path / "none.json", steps=0)
    for _ in range(20):
        trace.step()
        assert status.spans is None
        assert status.working("work") is status.working("more work")  # nothing is made
    trace.close()
    assert not (mpi_tmp_path / "none.json").exists()


@pytest.mark.mpi
@pytest.mark.parametrize("steps_before", [1, 3])
def test_a_trace_that_is_given_up_needs_nobody(world: World, mpi_tmp_path: Path, steps_before: int) -> None:
    """Before it began and in the middle: ranks that stand one step apart do not wait for each other afterwards."""
    trace = Trace(world, mpi_tmp_path / "trace.json", from_step=2, steps=4)
    for _ in range(steps_before):
        trace.step()
    trace.give_up()
    assert status.spans is None
    for _ in range(10 + world.rank):
        trace.step()
    trace.close()
    assert not (mpi_tmp_path / "trace.json").exists()


@pytest.mark.mpi
def test_a_trace_that_cannot_be_written_ends_no_run(
    world: World, mpi_tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace = Trace(world, mpi_tmp_path / "not there" / "trace.json", from_step=0, steps=1)
    trace.step()
    assert ("cannot write the trace" in caplog.text) == (world.rank == 0)
    world.barrier()


@pytest.mark.mpi
def test_clocks_of_nodes_are_compared(world: World) -> None:
    """Ranks that say they are nodes of their own, with clocks that are hours apart and drift, agree on the time."""
    alone = dataclasses.replace(world, local_rank=0, node_comm=world.comm.Split(world.rank))
    begin_ns = time.monotonic_ns()

    def now_ns() -> int:
        """Hours ahead for each rank, and 1 % too fast for each."""
        passed_ns = time.monotonic_ns() - begin_ns
        return begin_ns + world.rank * 10**13 + passed_ns + world.rank * passed_ns // 100

    first = read_clock(alone, now_ns)
    time.sleep(0.2)
    last = read_clock(alone, now_ns)
    true_ns, here_ns = time.monotonic_ns(), now_ns()
    assert first.error_ns < 5e7
    allowed_ns = first.error_ns + 10 * last.error_ns + 1e6
    assert abs(rank_0_ns(here_ns, first, last) - true_ns) < allowed_ns
    alone.node_comm.Free()
