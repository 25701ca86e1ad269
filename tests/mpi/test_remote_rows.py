"""Rows in the memory of all ranks, fetched by messages: the same bytes, whatever the shares."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import mpidp
from mpidp.world.rank_memory import RemoteRows

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
def remote(world: mpidp.World, counts: np.ndarray, row_bytes: int) -> Iterator[RemoteRows]:
    """Rows whose values are their `contents`."""
    held = RemoteRows(world.comm, counts, row_bytes)
    first = int(counts[: world.rank].sum())
    held.segment[:] = contents(np.arange(first, first + counts[world.rank]), row_bytes)
    yield held
    held.close()


def check(held: RemoteRows, rows: np.ndarray, row_bytes: int) -> None:
    """Fetch rows and compare them."""
    out = np.zeros((len(rows), row_bytes), np.uint8)
    held.start(rows, out)
    held.finish()
    np.testing.assert_array_equal(out, contents(rows, row_bytes))


@pytest.mark.parametrize("row_bytes", [1, 7, 1500])
@pytest.mark.parametrize("kind", SHARES)
def test_rows_by_value(world: mpidp.World, kind: str, row_bytes: int) -> None:
    """Behaviours 23 and 27: any rows, some twice; other rows on each rank, and none on one."""
    counts = rows_per_rank(kind, world.size)
    total = int(counts.sum())
    generator = np.random.default_rng(world.rank)
    with remote(world, counts, row_bytes) as held:
        assert held.num_rows == total
        for turn in range(5):
            count = 0 if turn == world.rank or not total else int(generator.integers(1, 2 * total + 2))
            check(held, np.sort(generator.integers(0, max(1, total), count)), row_bytes)
        check(held, np.arange(total), row_bytes)


def test_large_transfers_are_split(world: mpidp.World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs and single rows of more bytes than one message may have."""
    monkeypatch.setattr("mpidp.world.rank_memory.MOST_BYTES", 10)
    counts = rows_per_rank("uneven", world.size)
    with remote(world, counts, 33) as held:
        check(held, np.arange(int(counts.sum())), 33)


def test_rows_travel_between_start_and_finish(world: mpidp.World) -> None:
    """Other messages, and rows of others, may come between; closing ends a fetch that nobody waited for."""
    counts = rows_per_rank("uneven", world.size)
    rows = np.arange(int(counts.sum()))
    with remote(world, counts, 64) as held, remote(world, counts, 9) as other:
        out = np.zeros((len(rows), 64), np.uint8)
        held.start(rows, out)
        assert world.sum([1.0]) == [world.size]
        check(other, rows[::2].copy(), 9)
        held.finish()
        np.testing.assert_array_equal(out, contents(rows, 64))
        held.start(rows, out)
    with remote(world, counts, 5) as held:
        check(held, rows, 5)
