"""Rows in the memory of all ranks, fetched one-sidedly and by messages: the same bytes, whatever the shares."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpidp
from mpidp.world import all_to_all, one_sided
from mpidp.world.one_sided import OneSided, Window
from mpidp.world.remote_memory import RemoteRows, Way
from mpidp.world.wanted import Wanted

WAYS: tuple[Way, ...] = ("one-sided", "all-to-all")
SHARES = ("even", "uneven", "a rank without rows", "more ranks than rows", "no rows")


def rows_per_rank(kind: str, size: int) -> np.ndarray:
    """Return how many rows each rank holds."""
    ranks = np.arange(size)
    return {
        "even": np.full(size, 12),
        "uneven": 5 * ranks + 3,
        "a rank without rows": np.where(ranks == size // 2, 0, 9) if size > 1 else np.array([9]),
        "more ranks than rows": (ranks == size - 1).astype(int),
        "no rows": np.zeros(size, int),
    }[kind].astype(np.int64)


def contents(rows: np.ndarray, row_bytes: int) -> np.ndarray:
    """Return what row number r holds: bytes that differ from row to row and from byte to byte."""
    words = (rows[:, None] * 2_654_435_761 + np.arange(row_bytes) * 40_503) >> 7
    return (words % 256).astype(np.uint8)


@contextmanager
def remote(world: mpidp.World, counts: np.ndarray, row_bytes: int, way: Way = "auto") -> Iterator[RemoteRows]:
    """Rows whose values are their `contents`."""
    held = RemoteRows(world.comm, counts, row_bytes, way)
    first = int(counts[: world.rank].sum())
    held.segment[:] = contents(np.arange(first, first + counts[world.rank]), row_bytes)
    held.publish()
    yield held
    held.free()


@pytest.mark.parametrize("row_bytes", [1, 7, 1500])
@pytest.mark.parametrize("kind", SHARES)
@pytest.mark.parametrize("way", WAYS)
def test_rows_by_value(world: mpidp.World, way: Way, kind: str, row_bytes: int) -> None:
    """Behaviours 23 and 27: any rows, in any order, some twice; other rows on each rank, and none on one."""
    counts = rows_per_rank(kind, world.size)
    total = int(counts.sum())
    generator = np.random.default_rng(world.rank)
    with remote(world, counts, row_bytes, way) as held:
        assert held.num_rows == total
        assert held.way == ("local" if world.size == 1 else way)
        for turn in range(5):
            count = 0 if turn == world.rank or not total else int(generator.integers(1, 2 * total + 2))
            rows = generator.integers(0, max(1, total), count)
            out = np.zeros((count, row_bytes), np.uint8)
            held.fetch(rows, out)
            np.testing.assert_array_equal(out, contents(rows, row_bytes))
        everything = np.arange(total)
        out = np.zeros((total, row_bytes), np.uint8)
        held.fetch(everything, out)
        np.testing.assert_array_equal(out, contents(everything, row_bytes))


@pytest.mark.parametrize("way", WAYS)
def test_large_transfers_are_split(world: mpidp.World, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs and single rows of more bytes than one transfer may have."""
    monkeypatch.setattr(one_sided, "MOST_BYTES", 10)
    monkeypatch.setattr(all_to_all, "MOST_BYTES", 10)
    counts = rows_per_rank("uneven", world.size)
    rows = np.arange(int(counts.sum()))
    with remote(world, counts, 33, way) as held:
        out = np.zeros((len(rows), 33), np.uint8)
        held.fetch(rows, out)
        np.testing.assert_array_equal(out, contents(rows, 33))


@pytest.mark.parametrize("way", WAYS)
def test_rows_travel_between_start_and_finish(world: mpidp.World, way: Way) -> None:
    """Other messages, and none of MPI, may come between; freeing ends a fetch that nobody waited for."""
    counts = rows_per_rank("uneven", world.size)
    rows = np.random.default_rng(5).permutation(int(counts.sum()))
    with remote(world, counts, 64, way) as held:
        out = np.zeros((len(rows), 64), np.uint8)
        held.start(rows, out)
        assert world.sum([1.0]) == [world.size]
        held.finish()
        np.testing.assert_array_equal(out, contents(rows, 64))
        held.start(rows, out)


def test_the_test_at_start_trusts_gets_that_are_right(world: mpidp.World) -> None:
    """Both MPI libraries of the tests fetch the right rows."""
    with remote(world, rows_per_rank("uneven", world.size), 100) as held:
        assert held.way == ("local" if world.size == 1 else "one-sided"), held.reason


class WrongOnTheLastRank(OneSided):
    """Gets of which some bring the row before."""

    def start(self, wanted: Wanted, into: np.ndarray) -> None:
        last = self._rank == MPI.COMM_WORLD.size - 1
        super().start(Wanted(wanted.ranks, np.maximum(wanted.rows - 1, 0)) if last else wanted, into)


class Nothing(OneSided):
    """Gets that bring nothing, and say nothing."""

    def start(self, wanted: Wanted, into: np.ndarray) -> None:
        pass


class Failing(OneSided):
    """Gets that the library refuses on one rank."""

    def finish(self) -> None:
        super().finish()
        if self._rank == 0:
            raise MPI.Exception(MPI.ERR_RMA_ATTACH)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "broken, reason", [(WrongOnTheLastRank, "were wrong"), (Nothing, "were wrong"), (Failing, "gets failed on rank 0")]
)
def test_gets_that_are_wrong_are_not_used(
    world: mpidp.World, broken: type[OneSided], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks take messages, with one reason, and the rows are right."""
    monkeypatch.setattr("mpidp.world.remote_memory.OneSided", broken)
    counts = rows_per_rank("uneven", world.size)
    rows = np.arange(int(counts.sum()))[::-1]
    with remote(world, counts, 20) as held:
        assert held.way == "all-to-all" and reason in held.reason
        assert len(set(world.comm.allgather(held.reason))) == 1
        out = np.zeros((len(rows), 20), np.uint8)
        held.fetch(rows, out)
        np.testing.assert_array_equal(out, contents(rows, 20))


@pytest.mark.mpi(min_size=2)
def test_copies_that_mpi_keeps_are_not_trusted(world: mpidp.World, monkeypatch: pytest.MonkeyPatch) -> None:
    """In MPI's separate memory model a get may miss what its target stored."""
    doubt = "keeps a copy" if world.rank == 1 else ""
    monkeypatch.setattr(Window, "doubt", lambda self: doubt)
    with remote(world, rows_per_rank("even", world.size), 20) as held:
        assert held.way == "all-to-all" and held.reason == "keeps a copy"


@pytest.mark.mpi(min_size=2)
def test_no_window(world: mpidp.World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that cannot make windows on one rank: messages on all."""
    open_window = one_sided._open
    made: list[MPI.Win] = []

    def refuse(*arguments: Any) -> Any:
        window, memory = open_window(*arguments)
        made.append(window)
        if world.rank == 1:
            window.Lock_all(MPI.MODE_NOCHECK)
            raise MPI.Exception(MPI.ERR_WIN)
        return window, memory

    monkeypatch.setattr(one_sided, "_open", refuse)
    counts = rows_per_rank("uneven", world.size)
    rows = np.arange(int(counts.sum()))
    with remote(world, counts, 20) as held:
        assert held.way == "all-to-all" and "no window can be made on rank 1" in held.reason
        out = np.zeros((len(rows), 20), np.uint8)
        held.fetch(rows, out)
        np.testing.assert_array_equal(out, contents(rows, 20))
    made[0].Unlock_all()
    made[0].Free()


@pytest.mark.parametrize("free", [0, None])
def test_memory_of_our_own_where_shared_memory_is_small(
    world: mpidp.World, free: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows over ordinary memory, where the node's shared memory has no room; and where it cannot be asked."""
    monkeypatch.setattr(one_sided, "free_shared_memory", lambda: free)
    counts = rows_per_rank("uneven", world.size)
    rows = np.arange(int(counts.sum()))
    with remote(world, counts, 20) as held:
        assert ("/dev/shm is too small" in held.reason) == (free == 0 and world.size > 1)
        out = np.zeros((len(rows), 20), np.uint8)
        held.fetch(rows, out)
        world.barrier()
        np.testing.assert_array_equal(out, contents(rows, 20))


def test_neighbouring_rows_are_one_transfer() -> None:
    """Rows 3, 4, 5 of rank 0 and 0, 1 of rank 2, of which 1 twice."""
    wanted = Wanted(np.array([0, 0, 0, 2, 2, 2]), np.array([3, 4, 5, 0, 1, 1]))
    begins, counts = wanted.runs()
    assert begins.tolist() == [0, 3, 5] and counts.tolist() == [3, 2, 1]
    assert [len(part) for part in Wanted(np.empty(0, np.int64), np.empty(0, np.int64)).runs()] == [0, 0]
