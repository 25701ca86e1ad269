"""`PlanRows` gives what the plan gives, and draws each group's permutation once."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidp.hdf5.order.order import Order, PlanRows, Shuffle
from mpidp.hdf5.order.plan import StreamPlan

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


@settings(deadline=None, max_examples=150)
@given(orders(), st.integers(0, 5), st.sampled_from([1, 2, 3, 5, 64]), st.data())
def test_the_rows_of_the_plan(order: Order, epoch: int, size: int, data: st.DataObject) -> None:
    """Behaviours 23 to 25: batch after batch from any position, on any rank."""
    plan = order.plan(epoch)
    rows = PlanRows(plan)
    rank = data.draw(st.integers(0, size - 1))
    position = data.draw(st.integers(0, order.num_samples))
    while position < order.num_samples:
        indices = plan.local_indices(position, size, rank)
        found = rows(indices)
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, plan.rows(indices))
        position = plan.step(position)[1]


@settings(deadline=None, max_examples=100)
@given(orders(), st.data())
def test_any_samples_in_any_order(order: Order, data: st.DataObject) -> None:
    """Also those that no rank would ask for."""
    plan = order.plan(1)
    rows = PlanRows(plan)
    for _ in range(3):
        indices = np.array(data.draw(st.lists(st.integers(0, order.num_samples - 1))), dtype=np.int64)
        np.testing.assert_array_equal(rows(indices), plan.rows(indices))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_permutation_is_drawn_once(size: int) -> None:
    """The cost of a batch does not grow with the chunks: 1,000 batches, and as many permutations as groups."""
    order = Order(np.full(50, 160), seed=1, streams=4, mixing_chunks=5, global_batch=8)
    plan = order.plan(0)
    assert isinstance(plan, StreamPlan)
    drawn: list[int] = []
    draw = plan._group_permutation
    with patch.object(plan, "_group_permutation", lambda group: drawn.append(group) or draw(group)):
        for rank in range(size):
            rows = PlanRows(plan)
            for position in range(0, order.num_samples, 8):
                rows(plan.local_indices(position, size, rank))
    groups = set(plan.groups(np.arange(order.num_samples)).tolist())
    assert sorted(drawn) == sorted(groups)
