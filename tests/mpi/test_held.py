"""Rows held in memory, once a node or spread over all ranks: the values of the rows that were asked for."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpidp
from mpidp.errors import DataError
from mpidp.hdf5.dataset import Field, Rows
from mpidp.hdf5.modes import memory
from mpidp.hdf5.modes.memory import Contents, NodeMemory, Read, SpreadMemory
from mpidp.hdf5.plan import Piece
from mpidp.world.world import World

Held = NodeMemory | SpreadMemory
Make = Callable[..., Held]


KINDS: dict[str, Make] = {"node": NodeMemory, "store": SpreadMemory}
DTYPES = ("?", "i1", "i2", "i4", "i8", "u1", "u2", "f2", "f4", "f8", "c8", "c16")
CHUNKS = {
    "several": np.array([5, 0, 8, 8, 1, 8, 3], dtype=np.int64),
    "one": np.array([17], dtype=np.int64),
    "one row": np.array([0, 1], dtype=np.int64),
}


def values(field: Field, numbers: np.ndarray) -> np.ndarray:
    """Return what a field holds in rows `numbers` over all files: bytes without a pattern, NaN among them."""
    width = max(1, field.row_bytes)
    data = ((numbers[:, None] * 2_654_435_761 + np.arange(width) * 40_503) >> 7) % (2 if field.dtype == bool else 256)
    return data.astype(np.uint8).view(field.dtype).reshape(len(numbers), *field.shape)


def reader(contents: Contents, failing: bool = False) -> Read:
    """Return a decoder of made-up data; where rows are selected, every second row is."""
    starts = np.cumsum(contents.chunk_rows) - contents.chunk_rows

    def read(piece: Piece, into: Rows) -> None:
        if failing:
            raise DataError(f"chunk {piece.chunk} cannot be decoded")
        rows = starts[piece.chunk] + np.arange(piece.start, piece.stop)
        into.numbers[:] = rows if contents.all_rows else 2 * rows
        for field in contents.fields:
            assert into.fields[field.name].flags.c_contiguous
            into.fields[field.name][:] = values(field, into.numbers)

    return read


def check(held: Held, contents: Contents, numbers: np.ndarray) -> None:
    """Fetch rows and compare them, bit for bit."""
    out = Rows.empty(contents.fields, len(numbers))
    held.start(numbers)
    held.finish(out)
    expected = numbers if contents.all_rows else 2 * numbers
    np.testing.assert_array_equal(out.numbers, expected)
    for field in contents.fields:
        found = out.fields[field.name]
        assert found.tobytes() == values(field, expected).tobytes(), field.name


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("all_rows", [True, False])
@pytest.mark.parametrize("chunks", list(CHUNKS))
@pytest.mark.parametrize("kind", list(KINDS))
def test_values(world: mpidp.World, kind: str, chunks: str, all_rows: bool, threads: int) -> None:
    """Behaviours 23 and 27: rows of 1 KiB, of 1 byte and of odd sizes; other rows on each rank, and none on one."""
    fields = (
        Field("wide", (33, 8), np.dtype("f4")),
        Field("y", (), np.dtype("i8")),
        Field("odd", (3,), np.dtype("u1")),
    )
    contents = Contents(fields, CHUNKS[chunks], all_rows)
    held = KINDS[kind](contents, reader(contents), world, threads=threads)
    generator = np.random.default_rng(world.rank)
    for turn in range(world.size + 1):
        count = 0 if turn == world.rank else int(generator.integers(1, 60))
        check(held, contents, generator.integers(0, contents.num_rows, count))
    check(held, contents, np.arange(contents.num_rows))
    held.close()


@pytest.mark.parametrize("code", DTYPES)
@pytest.mark.parametrize("kind", list(KINDS))
def test_dtypes(world: mpidp.World, kind: str, code: str) -> None:
    """Behaviour 27: every dtype a batch can hold, as a value of one byte or more and as an array."""
    dtype = np.dtype(code)
    single = Contents((Field("x", (), dtype),), CHUNKS["several"], True)
    assert single.record.itemsize == Field("x", (), dtype).row_bytes
    array = Contents((Field("0", (), np.dtype("u1")), Field("x", (2, 3), dtype)), CHUNKS["several"], True)
    for contents in (single, array):
        held = KINDS[kind](contents, reader(contents), world)
        check(held, contents, np.random.default_rng(world.rank).permutation(contents.num_rows))
        held.close()


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_fetch_that_is_dropped(world: mpidp.World, kind: str) -> None:
    """A pass that ends early leaves a fetch behind: it is ended, or dropped with the memory."""
    contents = Contents((Field("x", (5,), np.dtype("f4")),), CHUNKS["several"], True)
    held = KINDS[kind](contents, reader(contents), world)
    numbers = np.arange(contents.num_rows)[:: world.rank + 1]
    held.start(numbers)
    world.barrier()
    held.finish(None)
    check(held, contents, numbers)
    held.start(numbers)
    held.close()


@pytest.mark.parametrize("failing", ["first", "last"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_chunk_that_cannot_be_decoded(world: mpidp.World, kind: str, threads: int, failing: str) -> None:
    """Behaviour 29: one rank reads it, every rank raises; nothing is left, so that another attempt works."""
    contents = Contents((Field("x", (5,), np.dtype("f4")),), CHUNKS["several"], True)
    fails = world.rank == (0 if failing == "first" else world.size - 1)
    with pytest.raises(DataError, match=r"chunk \d cannot be decoded"):
        KINDS[kind](contents, reader(contents, fails), world, threads=threads)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mpidp-fill")]
    held = KINDS[kind](contents, reader(contents), world)
    check(held, contents, np.arange(contents.num_rows))
    held.close()


@pytest.mark.parametrize("kind", list(KINDS))
def test_too_little_memory(world: mpidp.World, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is needed, what is there, and what to do, on every rank, though one node alone may lack it."""
    monkeypatch.setattr(memory, "available_memory", lambda: 1000 if world.rank == 0 else 2**40)
    contents = Contents((Field("x", (5,), np.dtype("f4")),), np.array([10_000]), True)
    with pytest.raises(DataError) as caught:
        KINDS[kind](contents, reader(contents), world)
    here = 1 if kind == "node" else world.broadcast(world.local_size) / world.size
    assert f" {int(200 * here)},0" in str(caught.value) and "1,000 bytes left" in str(caught.value)
    assert 'mode="stream"' in str(caught.value)
    assert world.all(True)


@pytest.mark.mpi(min_size=2)
def test_windows_that_cannot_be_had(world: mpidp.World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that lets ranks share nothing is named by its own error, on every rank."""
    if world.all(world.local_size == 1):
        pytest.skip("ranks that are alone on their nodes share nothing")

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", "/proc/1/fd/3")

    monkeypatch.setattr(memory, "SharedWindow", refuse)
    contents = Contents((Field("x", (5,), np.dtype("f4")),), CHUNKS["several"], True)
    with pytest.raises(DataError, match=r'cannot share .*Permission denied.* take mode="store"'):
        NodeMemory(contents, reader(contents), world)


def test_one_process_alone(world: mpidp.World) -> None:
    """Without MPI this process holds all."""
    contents = Contents((Field("x", (5,), np.dtype("f4")),), CHUNKS["several"], False)
    held = NodeMemory(contents, reader(contents), World.alone())
    check(held, contents, np.random.default_rng(1).permutation(contents.num_rows))
    held.close()


@pytest.mark.parametrize("kind", list(KINDS))
def test_what_is_held(world: mpidp.World, kind: str) -> None:
    """A copy a node, or one over all ranks; the line says so, on all ranks alike."""
    contents = Contents((Field("x", (256, 256), np.dtype("f4")),), CHUNKS["several"], True)
    held = KINDS[kind](contents, reader(contents), world)
    where = f"once a node, read by its {world.local_size} rank(s)" if kind == "node" else "once over all ranks"
    assert held.line.startswith(f"8.2 MiB of decoded rows held {where}")
    held.close()


def test_pieces_of_a_share() -> None:
    """Each row lies in one piece, and chunks without rows in none."""
    contents = Contents((), CHUNKS["several"], True)
    found = [(piece.chunk, piece.start, piece.stop, at) for piece, at in contents.pieces(3, 25)]
    assert found == [(0, 3, 5, 0), (2, 0, 8, 2), (3, 0, 8, 10), (4, 0, 1, 18), (5, 0, 3, 19)]
    assert list(contents.pieces(4, 4)) == []
