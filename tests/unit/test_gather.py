"""What gatherers return for steps in any order: the rows of the plan, with their values, from a bounded store."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from unittest.mock import patch

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidp.hdf5.dataset import Rows
from mpidp.hdf5.field import Field
from mpidp.hdf5.files.describe import describe
from mpidp.hdf5.gather import GroupStore, StreamGatherer, number_of_slots
from mpidp.hdf5.memory_budget import resources
from mpidp.hdf5.modes.stream import FileRows
from mpidp.hdf5.order import Order, Share, Split
from mpidp.hdf5.plan import Piece, StreamPlan
from mpidp.hdf5.prefetch import BatchRing
from mpidp.hdf5.read import Selection

FIELDS = (Field("x", (2,), np.dtype("i8")), Field("y", (), np.dtype("i4")))


@dataclass
class MadeUpReader:
    """Stands for `RowReader`: row i holds x = [i, -i], y = 3 i. Counts how often each row was read."""

    chunk_rows: np.ndarray
    read_rows: Counter[int] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, piece: Piece, into: Rows) -> None:
        first = int(self.chunk_rows[: piece.chunk].sum())
        into.numbers[:] = np.arange(first + piece.start, first + piece.stop)
        into.fields["x"][:] = into.numbers[:, None] * [1, -1]
        into.fields["y"][:] = 3 * into.numbers
        with self.lock:
            self.read_rows.update(into.numbers.tolist())

    def empty(self, count: int) -> Rows:
        return Rows.empty(FIELDS, count)


@st.composite
def orders(draw: st.DrawFn) -> Order:
    heights = st.one_of(st.integers(0, 3), st.integers(0, 40))
    chunk_rows = draw(st.lists(heights, min_size=1, max_size=30).filter(any))
    streams, mixing = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    batch = draw(st.integers(1, 50))
    drop_last = draw(st.booleans()) and batch <= sum(chunk_rows)
    return Order(np.array(chunk_rows), draw(st.integers(0, 99)), streams, mixing, batch, drop_last=drop_last)


@settings(max_examples=150)
@given(order=orders(), size=st.integers(1, 12), data=st.data())
def test_streams(order: Order, size: int, data: st.DataObject) -> None:
    """Behaviours 23 to 25: any rank, from any position on, over the end of an epoch, with the least room there can be.

    Where an incomplete last step is left out, nothing is read for it.
    More ranks than streams share a stream; a rank may have no samples at all.
    """
    rank = data.draw(st.integers(0, size - 1))
    position = data.draw(st.integers(0, order.num_samples))
    spare = data.draw(st.integers(1, 4))
    reader = MadeUpReader(order.chunk_rows)
    capacity = order.mixing_chunks * int(order.chunk_rows.max())
    with ThreadPoolExecutor(2) as pool:
        store = GroupStore(reader, pool, number_of_slots(order.streams, size, rank) + spare, capacity)  # type: ignore[arg-type]
        for epoch in (1, 2):
            plan = order.plan(epoch)
            assert isinstance(plan, StreamPlan)
            end = order.end(position)
            gatherer = StreamGatherer(plan, store, size, rank, position, end)
            reader.read_rows.clear()
            while position < end:
                gatherer.start_ahead()
                indices = plan.local_indices(position, size, rank)
                into = Rows.empty(FIELDS, len(indices))
                gatherer.gather(indices, into)
                expected = plan.rows(indices)
                np.testing.assert_array_equal(into.numbers, expected)
                np.testing.assert_array_equal(into.fields["x"], expected[:, None] * [1, -1])
                np.testing.assert_array_equal(into.fields["y"], 3 * expected)
                position += min(order.global_batch, order.num_samples - position)
            gatherer.release()
            assert not reader.read_rows or max(reader.read_rows.values()) == 1  # no row was decoded twice
            position = 0
        assert len(store._free) == number_of_slots(order.streams, size, rank) + spare


@settings(max_examples=60)
@given(
    place=st.permutations(range(12)),
    count=st.integers(0, 12),
    seed=st.integers(0, 9),
)
def test_rows_are_copied_to_any_places(place: list[int], count: int, seed: int) -> None:
    """Places that ascend, that do not, and that only seem to be a run, as 0, 2, 1, 3 are."""
    source = Rows.empty(FIELDS, 20)
    MadeUpReader(np.array([20])).read(Piece(0, 0, 20), source)
    index = np.random.default_rng(seed).integers(0, 20, count)
    into = Rows.empty(FIELDS, 12)
    where = np.array(place[:count], dtype=np.int64)
    into.take_from(source, index, where)
    np.testing.assert_array_equal(into.numbers[where], index)
    np.testing.assert_array_equal(into.fields["x"][where], index[:, None] * [1, -1])
    np.testing.assert_array_equal(into.fields["y"][where], 3 * index)


@pytest.fixture(scope="module")
def selections(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Selection]:
    """Real files: of chunks of 64 KiB that mix heights, without chunks, and one part of the rows."""
    folder = tmp_path_factory.mktemp("gather")
    i = np.arange(120)
    with h5py.File(folder / "a.h5", "w") as file:
        x = i[:50, None] + np.zeros(3000, "i8")
        file.create_dataset("x", data=x, chunks=(3, 3000), compression="gzip")
        file.create_dataset("y", data=i[:50], chunks=(7,))
    with h5py.File(folder / "b.h5", "w") as file:
        file["x"], file["y"] = i[50:, None] + np.zeros(3000, "i8"), i[50:]
    both = describe([folder / "a.h5", folder / "b.h5"], ("x", "y"))
    plain = describe(folder / "b.h5", ("x", "y"))
    return {
        "files": Selection(both),
        "part": Selection(both, Split(both.chunk_rows, 0.4, 3), "train"),
        "plain": Selection(plain),
    }


@pytest.mark.parametrize("kind", ["files", "part", "plain"])
@settings(max_examples=25)
@given(
    shuffle=st.sampled_from(["streams", "full", "none"]),
    size=st.integers(1, 5),
    memory=st.sampled_from([1, 10**6, 10**8]),
    parts=st.booleans(),
    data=st.data(),
)
def test_steps_of_real_files(
    selections: dict[str, Selection], kind: str, shuffle: str, size: int, memory: int, parts: bool, data: st.DataObject
) -> None:
    """Behaviours 23 to 25 and 27: with next to no memory, with some, and with enough to keep everything.

    Also where several threads read each step, of which a rank may have nothing.
    """
    selection = selections[kind]
    streams, mixing, batch = (data.draw(st.integers(1, most)) for most in (6, 3, 30))
    seed, drop_last = data.draw(st.integers(0, 9)), data.draw(st.booleans())
    order = Order(selection.chunk_rows, seed, streams, mixing, batch, shuffle, drop_last)  # type: ignore[arg-type]
    rank, position = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, order.num_samples - 1))
    use = resources(order, selection.dataset.row_bytes, memory, 2, size, rank)
    ring = BatchRing(selection.dataset.fields, batch, 4, torch.device("cpu"))
    with patch("mpidp.hdf5.modes.stream._PART_BYTES", 1 if parts else 2**20):
        made = FileRows(selection, "").steps(order, Share(0, position, size, rank), ring, use)
        steps = [next(made) for _ in range(min(12, order.steps(position) + 2))]
    starts = np.cumsum(selection.chunk_rows) - selection.chunk_rows
    try:
        for assembled in steps:
            plan = order.plan(assembled.step.epoch)
            selected = plan.rows(plan.local_indices(assembled.step.start, size, rank))
            chunks = np.searchsorted(starts + selection.chunk_rows, selected, side="right")
            inside = selected - starts[chunks]
            if selection.split is not None:
                part = (selection.split.rows(chunk, "train") for chunk in chunks.tolist())
                inside = np.array([rows[k] for rows, k in zip(part, inside, strict=True)], dtype=np.int64)
            expected = (selection.dataset.chunk_starts[chunks] + inside).tolist()
            assert assembled.indices.tolist() == expected
            first = 50 if kind == "plain" else 0
            np.testing.assert_array_equal(assembled.tensors["y"], np.array(expected) + first)
            np.testing.assert_array_equal(assembled.tensors["x"][:, 2999], np.array(expected) + first)
    finally:
        made.close()
