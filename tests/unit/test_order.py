"""The order of samples: every one once, the same global batches at any size, resumable at any position."""

from dataclasses import replace
from itertools import chain
from unittest.mock import patch
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidp.errors import DataError
from mpidp.hdf5.order import Order, Shuffle
from mpidp.hdf5.plan import Bijection, StreamPlan, automatic_streams, permutation, words

SIZES = (1, 2, 3, 5, 7, 8, 64)
SHUFFLES: tuple[Shuffle, ...] = ("streams", "full", "none")


@st.composite
def orders(draw: st.DrawFn) -> Order:
    chunk_rows = draw(st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any))
    return Order(
        np.array(chunk_rows),
        seed=draw(st.integers(0, 2**64 - 1)),
        streams=draw(st.sampled_from([1, 2, 3, 4, 8, 64, 100])),
        mixing_chunks=draw(st.integers(1, 20)),
        global_batch=draw(st.integers(1, 40)),
        shuffle=draw(st.sampled_from(SHUFFLES)),
    )


def steps(order: Order, epoch: int, position: int, size: int) -> list[list[np.ndarray]]:
    """Return the rows that each rank reads in each step from `position` on."""
    plan = order.plan(epoch)
    taken = []
    while position < order.num_samples:
        taken.append([plan.rows(plan.local_indices(position, size, rank)) for rank in range(size)])
        position = plan.step(position)[1]
    return taken


def batches(taken: list[list[np.ndarray]]) -> list[list[int]]:
    return [sorted(np.concatenate(ranks).tolist()) for ranks in taken]


@settings(deadline=None, max_examples=60)
@given(orders(), st.integers(0, 5))
def test_every_sample_once_in_the_same_batches_at_every_size(order: Order, epoch: int) -> None:
    """Behaviours 23 and 24."""
    expected = batches(steps(order, epoch, 0, 1))
    assert sorted(chain(*expected)) == list(range(order.num_samples))
    assert len(expected) == order.steps()
    for size in SIZES[1:]:
        assert batches(steps(order, epoch, 0, size)) == expected


@given(orders(), st.integers(0, 999))
def test_drop_last_leaves_out_an_incomplete_step(order: Order, position: int) -> None:
    """Behaviours 23 and 25: from any position on; the end is where a step ends."""
    position %= order.num_samples + 1
    if order.global_batch > order.num_samples:
        with pytest.raises(DataError, match="drop_last leaves no step"):
            replace(order, drop_last=True)
        return
    dropping = replace(order, drop_last=True)
    assert dropping.steps(position) == (order.num_samples - position) // order.global_batch
    assert dropping.end(position) == position + dropping.steps(position) * order.global_batch
    assert order.end(position) == order.num_samples


@settings(deadline=None, max_examples=60)
@given(orders(), st.data())
def test_resume_sees_exactly_the_unseen_samples(order: Order, data: st.DataObject) -> None:
    """Behaviour 25: at any position, with another size and another global batch."""
    position = data.draw(st.integers(0, order.num_samples))
    size = data.draw(st.sampled_from(SIZES))
    seen = order.plan(3).rows(np.arange(position))
    other = Order(
        order.chunk_rows,
        order.seed,
        order.streams,
        order.mixing_chunks,
        data.draw(st.integers(1, 40)),
        order.shuffle,
    )
    taken = steps(other, 3, position, size)
    assert len(taken) == other.steps(position)
    assert sorted([*seen.tolist(), *chain(*batches(taken))]) == list(range(order.num_samples))


@settings(deadline=None, max_examples=60)
@given(orders())
def test_groups_hold_whole_chunks_and_make_up_the_same_order(order: Order) -> None:
    """What the loader reads group by group is what `rows` says, and no group has more than K chunks."""
    plan = order.plan(1)
    if not isinstance(plan, StreamPlan):
        return
    indices = np.arange(order.num_samples)
    spots = plan.spots(indices)
    numbers = plan.groups(spots)
    starts = np.cumsum(order.chunk_rows) - order.chunk_rows
    for number in np.unique(numbers).tolist():
        group = plan.group(number)
        assert len(group.pieces) <= order.mixing_chunks
        line = np.concatenate([np.arange(p.start, p.stop) + starts[p.chunk] for p in group.pieces])
        inside = numbers == number
        offsets = spots[inside] - plan.group_start(np.array([number]))
        np.testing.assert_array_equal(line[group.permutation][offsets], plan.rows(indices[inside]))
        assert len(line) <= np.diff(plan._group_spots).max()


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("size", SIZES)
def test_few_samples(shuffle: Shuffle, size: int) -> None:
    """Behaviour 23: 1, size - 1, size and 5 size - 1 samples."""
    for num_samples in {1, max(1, size - 1), size, 5 * size - 1}:
        order = Order(np.array([num_samples]), 7, 8, 4, size, shuffle)
        taken = batches(steps(order, 0, 0, size))
        assert sorted(chain(*taken)) == list(range(num_samples))
        assert len(taken) == order.steps()


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_runs_of_equal_length_without_streams(shuffle: Shuffle) -> None:
    """Ranks get numbers of samples that differ by at most one, streams a multiple of the size permitting."""
    order = Order(np.full(20, 8), 0, 8, 4, 32, shuffle)
    plan = order.plan(0)
    counts = [len(plan.local_indices(32, 4, rank)) for rank in range(4)]
    assert counts == [8, 8, 8, 8]
    if shuffle != "streams":
        assert sorted(len(plan.local_indices(32, 5, rank)) for rank in range(5)) == [6, 6, 6, 7, 7]


@pytest.mark.parametrize("shuffle", ["streams", "full"])
def test_epochs_and_seeds_differ(shuffle: Shuffle) -> None:
    """Behaviour 24: a new order each epoch."""
    rows = np.full(20, 8)
    everything = np.arange(160)
    found = {
        tuple(Order(rows, seed, 4, 4, 16, shuffle).plan(epoch).rows(everything).tolist())
        for seed in (0, 1, 2**40)
        for epoch in range(4)
    }
    assert len(found) == 12


def test_golden_order() -> None:
    """The order of existing checkpoints and runs: if this fails, they can no longer be resumed."""
    streams = Order(np.array([3, 4, 2, 5]), 11, 2, 2, 4, "streams").plan(1).rows(np.arange(14))
    full = Order(np.array([14]), 11, 2, 2, 4, "full").plan(1).rows(np.arange(14))
    assert streams.tolist() == [12, 0, 10, 1, 8, 3, 13, 5, 9, 4, 7, 6, 11, 2]
    assert full.tolist() == [8, 9, 0, 3, 4, 6, 11, 13, 7, 2, 12, 1, 10, 5]
    many_groups = Order(np.arange(40), 11, 3, 2, 4, "streams").plan(1).rows(np.arange(780))
    assert crc32(many_groups.astype("<i8").tobytes()) == 2878321250
    assert words(2, 1, 2, 3).tolist() == [6117215985498484603, 3920260064652277829]
    assert permutation(6, 5, 4, 3).tolist() == [0, 1, 2, 3, 5, 4]


def test_full_order_is_mixed() -> None:
    """Neighbours in the order lie a third of the data apart on average, as in a random permutation."""
    count = 10_000
    image = Bijection(count, 3, 0)(np.arange(count))
    assert np.abs(np.diff(image)).mean() == pytest.approx(count / 3, rel=0.03)
    assert np.abs(image - np.arange(count)).mean() == pytest.approx(count / 3, rel=0.03)


def test_streams_mix_all_parts_of_the_file() -> None:
    """A batch of 64 from a sorted file of 8 classes has all of them, roughly evenly, every time."""
    order = Order(np.full(64, 128), 0, 64, 4, 64, "streams")
    plan = order.plan(0)
    for position in range(0, order.num_samples, 64 * 16):
        classes = plan.rows(np.arange(position, position + 64)) // 1024
        assert np.bincount(classes, minlength=8).min() >= 1


def test_ten_billion_rows() -> None:
    """Indices and rows are 64-bit and memory is in proportion to chunks."""
    chunk_rows = np.full(1000, 10**7)
    for shuffle in SHUFFLES:
        order = Order(chunk_rows, 0, 64, 4, 1024, shuffle)
        plan = order.plan(0)
        assert order.num_samples == 10**10
        local = plan.local_indices(10**10 - 7, 2, 1)
        assert local.dtype == np.int64
        assert local.max() < 10**10
        if shuffle == "full":
            rows = plan.rows(local)
            assert rows.min() >= 0 and rows.max() < 10**10


@pytest.mark.parametrize(
    ("rows", "seed", "streams", "mixing", "batch", "shuffle", "text"),
    [
        ([], 0, 1, 1, 1, "streams", "no rows"),
        ([0, 0], 0, 1, 1, 1, "none", "no rows"),
        ([5, -1], 0, 1, 1, 1, "streams", "fewer than 0"),
        ([5], -1, 1, 1, 1, "streams", "seed is -1"),
        ([5], 2**64, 1, 1, 1, "streams", "seed is"),
        ([5], 0, 0, 1, 1, "streams", "streams is 0"),
        ([5], 0, 1, 0, 1, "streams", "mixing_chunks is 0"),
        ([5], 0, 1, 1, 0, "streams", "global_batch is 0"),
        ([5], 0, 1, 1, 1, "shuffled", '"streams", "full" or "none"'),
    ],
)
def test_values_out_of_range(rows, seed, streams, mixing, batch, shuffle, text) -> None:  # type: ignore[no-untyped-def]
    """Behaviour 23: no rows is a clear error, as is every other value that cannot be."""
    with pytest.raises(DataError, match=text):
        Order(np.array(rows), seed, streams, mixing, batch, shuffle)


def test_positions_outside_the_epoch() -> None:
    plan = Order(np.array([5]), 0, 1, 1, 2).plan(0)
    for position in (-1, 6):
        with pytest.raises(DataError, match="outside this epoch of 5"):
            plan.local_indices(position, 1, 0)
    with pytest.raises(DataError, match="epoch is -1"):
        Order(np.array([5]), 0, 1, 1, 2).plan(-1)


@pytest.mark.parametrize(
    ("num_rows", "chunk_bytes", "streams"),
    [(10**6, 2**10, 64), (10**6, 2**22, 64), (10**6, 2**23, 32), (10**6, 2**40, 1), (5, 10, 4), (1, 10, 1)],
)
def test_automatic_streams(num_rows: int, chunk_bytes: int, streams: int) -> None:
    """At most 64, one a row, and 1 GiB of groups of 4 chunks."""
    assert automatic_streams(num_rows, chunk_bytes, 4) == streams


@settings(deadline=None, max_examples=100)
@given(orders(), st.data())
def test_rows_do_not_depend_on_what_was_asked_before(order: Order, data: st.DataObject) -> None:
    """Behaviour 25: batch after batch, or any samples, also those that no rank would ask for."""
    plan = order.plan(1)
    for _ in range(3):
        indices = np.array(data.draw(st.lists(st.integers(0, order.num_samples - 1))), dtype=np.int64)
        np.testing.assert_array_equal(plan.rows(indices), order.plan(1).rows(indices))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_permutation_is_drawn_once(size: int) -> None:
    """The cost of a batch does not grow with the chunks: 1,000 batches, and as many permutations as groups."""
    order = Order(np.full(50, 160), seed=1, streams=4, mixing_chunks=5, global_batch=8)
    drawn: list[int] = []
    for rank in range(size):
        plan = order.plan(0)
        assert isinstance(plan, StreamPlan)
        draw = plan._group_permutation
        with patch.object(plan, "_group_permutation", lambda group, draw=draw: drawn.append(group) or draw(group)):
            for position in range(0, order.num_samples, 8):
                plan.rows(plan.local_indices(position, size, rank))
    groups = set(order.plan(0).groups(np.arange(order.num_samples)).tolist())  # type: ignore[attr-defined]
    assert sorted(drawn) == sorted(groups)
