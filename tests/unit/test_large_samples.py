"""Samples of 64 KiB and more: their values, the order chosen for them, and what is read and held before a batch."""

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidp.hdf5.decode import RawFiles
from mpidp.hdf5.files.describe import describe
from mpidp.hdf5.loader import HDF5Loader
from mpidp.hdf5.memory_budget import amplification, choose_mixing, choose_shuffle, first_batch_bytes
from mpidp.hdf5.order import Order

pytestmark = pytest.mark.filterwarnings("ignore:.*bytes are decoded for each byte used", "ignore:.*comes from about")
ROWS = 23
KIB = 2**10
GIB = 2**30
FILTERS: dict[str, dict[str, Any]] = {
    "raw": {},
    "lz4": dict(hdf5plugin.LZ4()),
    "gzip": {"compression": "gzip", "shuffle": True, "fletcher32": True},
}
DTYPES = ("f4", ">f4", ">i2", "u2", "f8")
Write = Callable[..., Path]


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Makes a file of large samples `x` and, chunked on their own, labels `y`; each file once."""
    folder = tmp_path_factory.mktemp("large")

    @cache
    def written(chunk_rows: int | None, filters: str, dtype: str = "f4", shape: tuple[int, ...] = (129, 130)) -> Path:
        path = folder / f"{chunk_rows}-{filters}-{dtype.strip('>')}-{len(shape)}.h5"
        values = np.arange(ROWS * int(np.prod(shape))).reshape(ROWS, *shape) % 10_007
        with h5py.File(path, "w") as file:
            chunks = None if chunk_rows is None else (chunk_rows, *shape)
            file.create_dataset("x", data=values.astype(dtype), chunks=chunks, **FILTERS[filters])
            file.create_dataset("y", data=np.arange(ROWS, dtype="i8"), chunks=(7,), compression="gzip")
        return path

    return written


@pytest.mark.parametrize("shuffle", ["auto", "streams", "full", "none"])
@pytest.mark.parametrize("split", [None, ("train", 0.3)])
@pytest.mark.parametrize(("chunk_rows", "filters"), [(None, "raw"), *product((1, 2, 4, 5), FILTERS)])
def test_values_are_those_of_h5py(write: Write, chunk_rows: int | None, filters: str, split: Any, shuffle: Any) -> None:
    """Behaviours 23 and 27: chunks that do not divide the rows, byte orders, widened integers, a part of the rows."""
    shapes = ((129, 130), (33_000,), (3, 105, 107))
    for number, dtype in enumerate(DTYPES):
        path = write(chunk_rows, filters, dtype, shapes[number % 3])
        with h5py.File(path) as file:
            expected = file["x"][:]
        loader = HDF5Loader(path, ("x", "y"), 6, seed=number, split=split, shuffle=shuffle, threads=2)
        seen: list[int] = []
        for batch in loader:
            np.testing.assert_array_equal(batch.x.numpy(), expected[batch.indices])
            np.testing.assert_array_equal(batch.y, batch.indices)
            seen += batch.indices.tolist()
        assert len(seen) == len(set(seen)) == loader.num_samples
        assert split is not None or sorted(seen) == list(range(ROWS))
        loader.close()


def test_the_order_suits_the_file(write: Write) -> None:
    """Full where a sample can be read alone; else streams that do not mix chunks and hold few batches."""
    found = {
        (rows, filters): choose_shuffle(describe(write(rows, filters), ("x", "y")))
        for filters in FILTERS
        for rows in (1, 2, 4, 5)
    }
    full = {key for key, order in found.items() if order == "full"}
    assert full == {(1, "raw"), (2, "raw"), (4, "raw"), (1, "lz4"), (1, "gzip")}
    four = describe(write(4, "gzip"), ("x", "y"))
    assert choose_shuffle(describe(write(None, "raw"), ("x",))) == "full"
    assert [choose_mixing(four, GIB, None, None, batch) for batch in (4, 16, 16 * 4, 500)] == [
        (8, 1),
        (16, 1),
        (16, 1),  # there are not more rows
        (16, 1),
    ]
    assert choose_mixing(describe(write(2, "lz4"), ("x", "y")), GIB, None, None, 8) == (8, 1)
    assert choose_mixing(four, GIB, None, 2, 4) == (8, 2) and choose_mixing(four, GIB, 3, None, 4) == (3, 1)
    assert choose_mixing(four, 2 * 4 * four.row_bytes, None, None, 16) == (1, 1)  # memory of one chunk
    loader = HDF5Loader(write(1, "raw"), ("x",), 4, streams=2)
    assert (loader.order.shuffle, loader.order.streams) == ("streams", 2)  # who asks for streams has them
    loader.close()


def test_orders_of_small_samples_stay(tmp_path: Path) -> None:
    """Contract: what was chosen for samples of less than 64 KiB, also with a chunk each, is chosen for ever."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.zeros((200, 4000), "f4"), chunks=(1, 4000))
    dataset = describe(tmp_path / "a.h5", ("x",))
    assert choose_shuffle(dataset) == "streams"
    assert {choose_mixing(dataset, GIB, None, None, batch) for batch in (1, 8, 64, 150)} == {(64, 4)}


@settings(max_examples=60)
@given(
    chunk_rows=st.sampled_from([None, 1, 2, 4, 5]),
    filters=st.sampled_from(["raw", "lz4"]),
    global_batch=st.integers(1, ROWS),
    seed=st.integers(0, 2**64 - 1),
    size=st.integers(1, 4),
    epoch=st.integers(0, 3),
)
def test_every_sample_once_in_the_same_batches(
    write: Write, chunk_rows: int | None, filters: str, global_batch: int, seed: int, size: int, epoch: int
) -> None:
    """Behaviours 23 and 24: the order by default at 1 to 4 ranks; and few batches are read before the first."""
    dataset = describe(write(chunk_rows, filters if chunk_rows else "raw"), ("x", "y"))
    order = Order(
        dataset.chunk_rows,
        seed,
        *choose_mixing(dataset, GIB, None, None, global_batch),
        global_batch,
        choose_shuffle(dataset),
    )
    plan, seen = order.plan(epoch), []
    for position in range(0, ROWS, global_batch):
        ranks = [plan.local_indices(position, size, rank) for rank in range(size)]
        together = np.sort(np.concatenate(ranks))
        np.testing.assert_array_equal(together, np.arange(*plan.step(position)))
        seen += plan.rows(together).tolist()
    assert sorted(seen) == list(range(ROWS))
    if chunk_rows in (1, 2, 4):  # larger chunks are read whole, in eight streams
        assert first_batch_bytes(order, dataset) <= 4 * global_batch * dataset.row_bytes


def test_bytes_before_the_first_batch(write: Write) -> None:
    def chunks(rows: int, filters: str, **options: Any) -> float:
        dataset = describe(write(rows, filters), ("x", "y"))
        order = Order(dataset.chunk_rows, **{"seed": 0, "streams": 4, "mixing_chunks": 2, "global_batch": 4, **options})
        return first_batch_bytes(order, dataset) / dataset.row_bytes

    assert chunks(1, "raw", shuffle="full") == chunks(4, "raw", shuffle="full") == 4  # read one by one
    assert chunks(2, "lz4", shuffle="full", global_batch=3) == pytest.approx(3 * ROWS / 12, abs=1)  # 12 chunks
    assert chunks(1, "lz4", shuffle="streams") == 4 * 2  # a group in each of four streams
    assert chunks(1, "lz4", shuffle="streams", global_batch=2) == 2 * 2
    assert chunks(1, "lz4", shuffle="streams", global_batch=12) == 4 * 2 * 2  # two groups
    assert chunks(4, "lz4", shuffle="streams") == ROWS  # not more than there are
    assert chunks(1, "lz4", shuffle="none") == 4


def reads_of(
    loader: HDF5Loader, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return where bytes of the file were read to, and where batches lay, in an epoch: (start, stop) addresses."""
    read: list[tuple[int, int]] = []
    plain = RawFiles.read

    def noted(self: RawFiles, path: str, offset: int, into: Any) -> None:
        read.append((into.ctypes.data, into.ctypes.data + into.nbytes))
        plain(self, path, offset, into)

    monkeypatch.setattr(RawFiles, "read", noted)
    return read, [(batch.x.data_ptr(), batch.x.data_ptr() + batch.x.nbytes) for batch in loader]


@pytest.mark.parametrize("split", [None, ("train", 0.3)])
@pytest.mark.parametrize("chunk_rows", [None, 1, 2, 4])
def test_raw_samples_are_read_straight_into_the_batch(
    write: Write, chunk_rows: int | None, split: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte once, with no memory between, and into memory that is used again."""
    loader = HDF5Loader(write(chunk_rows, "raw"), ("x",), 2, split=split, memory_bytes=2**20, threads=2)
    read, batches = reads_of(loader, monkeypatch)
    row_bytes = loader.dataset.row_bytes
    loader.close()
    slots = set(start for start, _ in batches)
    assert all(any(slot <= start and stop <= slot + 2 * row_bytes for slot in slots) for start, stop in read)
    epoch_bytes = loader.num_samples * row_bytes
    # The next epoch is read ahead of its start.
    assert epoch_bytes <= sum(stop - start for start, stop in read) <= epoch_bytes + 8 * 2 * row_bytes
    assert len(slots) <= 8


@pytest.mark.parametrize("shuffle", ["full", "none"])
def test_decoded_chunks_come_into_the_same_memory(write: Write, shuffle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behaviour 28: chunks of which a batch takes a part are decoded into memory that is used again."""
    made: list[int] = []
    plain = np.empty

    def noted(shape: Any, *more: Any, **options: Any) -> Any:
        array = plain(shape, *more, **options)
        made.append(array.nbytes)
        return array

    loader = HDF5Loader(write(4, "lz4"), ("x",), 3, shuffle=shuffle, memory_bytes=2**20, threads=1)
    for _ in range(3):
        for _ in loader:
            pass
    monkeypatch.setattr(np, "empty", noted)
    for _ in loader:
        pass
    loader.close()
    assert max(made, default=0) < 64 * KIB


def test_single_raw_samples_cost_no_chunk(write: Write) -> None:
    """No warning of bytes decoded in vain where samples are read one by one."""
    for rows, filters, factor in ((4, "raw", 1.0), (1, "lz4", 1.0), (4, "lz4", ROWS / 6)):
        dataset = describe(write(rows, filters), ("x", "y"))
        order = Order(dataset.chunk_rows, 0, 8, 1, 4, "full")
        assert amplification(order, dataset, 2**20, 1) == pytest.approx(factor)


def test_a_run_that_began_in_streams_goes_on_in_streams(write: Write) -> None:
    """Behaviour 25: the order of a state is taken over by a loader that would have chosen another."""
    path = write(1, "raw")
    first = HDF5Loader(path, ("x",), 4, streams=3, mixing_chunks=2)
    rows = [batch.indices.tolist() for batch in first]
    second = HDF5Loader(path, ("x",), 4)
    assert second.order.shuffle == "full"
    second.load_state_dict({**first.state_dict(), "epoch": 0, "position": 8})
    assert [batch.indices.tolist() for batch in second] == rows[2:]
    first.close()
    second.close()
