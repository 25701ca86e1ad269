"""Enters: the order of every epoch, a rank's share. Leaves: the steps in their order, and the rank's rows in them."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from mpidp.hdf5.order.keyed import IntArray
from mpidp.hdf5.order.order import Order
from mpidp.hdf5.order.order_rows import PlanRows

# A bijection costs the same for one row and for hundreds: so those of some steps are computed at once.
_STEPS_AT_ONCE = 32


@dataclass(frozen=True)
class Share:
    """What `rank` of `size` reads, from `position` in `epoch` on."""

    epoch: int
    position: int
    size: int
    rank: int


@dataclass(frozen=True)
class Step:
    """The step [start, stop) of an epoch, in global samples."""

    epoch: int
    start: int
    stop: int


def steps(order: Order, share: Share) -> Iterator[Step]:
    """Yield the steps from `share` on without end: epoch follows epoch, so that the next is read ahead of its start."""
    epoch, position = share.epoch, share.position
    while True:
        end = order.end(position)
        while position < end:
            stop = min(position + order.global_batch, end)
            yield Step(epoch, position, stop)
            position = stop
        epoch, position = epoch + 1, 0


def step_rows(order: Order, share: Share) -> Iterator[tuple[Step, IntArray]]:
    """Yield each step from `share` on, without end, with the selected rows (int64) that the rank has in it."""
    endless = steps(order, share)
    plan, planned = order.plan(share.epoch), share.epoch
    rows_of = PlanRows(plan)
    while True:
        coming = list(islice(endless, _STEPS_AT_ONCE))
        for epoch in sorted({step.epoch for step in coming}):
            if epoch != planned:
                plan, planned = order.plan(epoch), epoch
                rows_of = PlanRows(plan)
            own = [step for step in coming if step.epoch == epoch]
            indices = [plan.local_indices(step.start, share.size, share.rank) for step in own]
            rows = rows_of(np.concatenate(indices))
            yield from zip(own, np.split(rows, np.cumsum([len(each) for each in indices])[:-1]), strict=True)
