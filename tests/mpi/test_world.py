"""The World's facts and collective helpers."""

import json
import math
import socket
from dataclasses import asdict
from typing import Any

import pytest
from mpi4py import MPI

import mpidp
from mpidp.errors import DataError, MpidpError
from mpidp.world.clock import clock_offsets
from mpidp.world.library import describe, from_json


class UnpicklableError(RuntimeError):
    """Cannot be rebuilt from its arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class PrefixingError(RuntimeError):
    """Would grow if it were rebuilt from its arguments."""

    def __init__(self, path: str) -> None:
        super().__init__(f"cannot open {path}")


def test_facts(world: mpidp.World) -> None:
    assert (world.rank, world.size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    assert world.comm.allgather(world.rank) == list(range(world.size))
    assert world.host == socket.gethostname()
    assert 0 <= world.local_rank < world.local_size
    assert world.num_nodes == len(set(world.comm.allgather(world.node)))
    assert MPI.Comm.Compare(world.comm, MPI.COMM_WORLD) == MPI.CONGRUENT  # a duplicate, not the thing itself


def test_init_returns_the_same_world(world: mpidp.World) -> None:
    if world.rank == 0:  # it is not collective any more
        assert mpidp.init() is world


@pytest.mark.parametrize("setter", ["nobody", "everybody", "first", "last"])
def test_any_and_all(world: mpidp.World, setter: str) -> None:
    last = world.size - 1
    flag = {"nobody": False, "everybody": True, "first": world.rank == 0, "last": world.rank == last}[setter]
    assert world.any(flag) is (setter != "nobody")
    assert world.all(flag) is (setter == "everybody" or (setter != "nobody" and world.size == 1))


def test_sum(world: mpidp.World) -> None:
    ranks = range(world.size)
    assert world.sum([world.rank, 0.5, -1]) == [sum(ranks), 0.5 * world.size, -world.size]
    assert world.sum([]) == []
    assert world.sum([2**53 - 1 if world.rank == 0 else 0]) == [2**53 - 1]  # counts stay exact


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_mean(world: mpidp.World, value: float) -> None:
    """Behaviour 16: what has no weight does not count, whatever it is."""
    weights = [rank + 1 for rank in range(world.size)]
    expected = sum(rank * weight for rank, weight in enumerate(weights)) / sum(weights)
    assert world.mean(world.rank) == (world.size - 1) / 2
    assert world.mean(world.rank, weights[world.rank]) == pytest.approx(expected)
    empty = world.rank == 0 and world.size > 1
    assert world.mean(value if empty else 2.5, 0 if empty else 3) == 2.5
    assert not math.isfinite(world.mean(value if world.rank == 0 else 1.0))
    with pytest.raises(ValueError, match="weights sum to 0"):
        world.mean(1.0, 0)


def test_broadcast(world: mpidp.World) -> None:
    value = {"a": [1, None], "who": world.rank}
    assert world.broadcast(value if world.rank == 0 else None) == {"a": [1, None], "who": 0}
    assert world.broadcast(None) is None


def test_barrier_times_out(world: mpidp.World) -> None:
    """Behaviour 32: rank 0 comes only when the others have given up."""
    if world.rank == 0:
        for _ in range(world.size - 1):
            MPI.COMM_WORLD.recv()
        world.barrier()
        return
    with pytest.raises(TimeoutError) as caught:
        world.barrier(timeout_s=0.05)
    MPI.COMM_WORLD.send("gave up", 0)
    for part in (f"rank {world.rank}", world.host, "0.05 s"):
        assert part in str(caught.value)


ERRORS: dict[str, Exception] = {
    "DataError": DataError("file x.h5: no dataset y"),
    "FileNotFoundError": FileNotFoundError(2, "No such file", "x.h5"),
    "KeyError": KeyError("y"),
    "UnicodeDecodeError": UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("who", ["first", "last", "all", "all but the first"])
def test_raise_on_all_ranks_raises_the_same_everywhere(world: mpidp.World, name: str, who: str) -> None:
    """Behaviour 29: type and text, and a note that says which rank it was: the lowest failing one."""
    ranks = list(range(world.size))
    failing = {"first": [0], "last": ranks[-1:], "all": ranks, "all but the first": ranks[1:] or ranks}[who]
    with pytest.raises(type(ERRORS[name])) as caught, world.raise_on_all_ranks("opening the data"):
        if world.rank in failing:
            raise ERRORS[name]
    assert type(caught.value) is type(ERRORS[name])
    assert str(caught.value) == str(ERRORS[name])
    note = caught.value.__notes__[-1]
    assert f"rank {failing[0]} of {world.size}" in note and world.host in note and "opening the data" in note
    assert world.all(True)  # collectives still match


@pytest.mark.parametrize("make", [lambda: UnpicklableError("a", "b"), lambda: PrefixingError("x.h5")])
def test_errors_that_cannot_travel_keep_type_name_and_text(world: mpidp.World, make: Any) -> None:
    """Behaviour 29: the failing rank raises its own; the others one that says the same."""
    error = make()
    with pytest.raises((MpidpError, RuntimeError)) as caught, world.raise_on_all_ranks("a test"):
        if world.rank == 0:
            raise error
    if world.rank == 0:
        assert caught.value is error
    else:
        assert str(caught.value) in (str(error), f"{type(error).__name__}: {error}")
        assert type(error).__name__ in f"{type(caught.value).__name__} {caught.value}"
        assert any("rank 0" in note for note in caught.value.__notes__)


def test_call_on_root(world: mpidp.World) -> None:
    ran: list[int] = []
    assert world.call_on_root(lambda: ran.append(world.rank) or "result") == "result"
    assert ran == ([0] if world.rank == 0 else [])
    with pytest.raises(ZeroDivisionError):
        world.call_on_root(lambda: 1 / 0)


def test_only_rank_0_says(world: mpidp.World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mpidp")
    world.log_once("hello")
    assert caplog.messages == (["hello"] if world.rank == 0 else [])


def test_clocks_of_one_node_are_one(world: mpidp.World) -> None:
    """Behaviour 46."""
    offsets_s = clock_offsets(world.comm)
    assert len(offsets_s) == (world.num_nodes if world.rank == 0 else 0)
    assert offsets_s[:1] == [0.0] * (world.rank == 0)


def test_the_library_says_the_same_of_itself_by_way_of_json(world: mpidp.World) -> None:
    """Behaviour 46: what a child prints is what this process knows."""
    library = describe()
    assert from_json(json.dumps(asdict(library))) == library
    assert library.size == world.size and library.thread_level.startswith("MPI_THREAD_")
    assert len(library.mapped.mpi) == 1
