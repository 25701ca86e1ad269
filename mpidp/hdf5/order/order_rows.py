"""Enters: global sample numbers of one epoch, batch after batch. Leaves: their rows, at a cost in proportion to them.

`EpochPlan.rows` may be asked for any sample, and draws the permutation of each sample's group anew. A rank goes
through its lanes in order, so here the group that each lane is in is kept.
"""

import numpy as np

from mpidp.hdf5.order.keyed import IntArray
from mpidp.hdf5.order.lanes import LanePlan
from mpidp.hdf5.order.plan import EpochPlan


class PlanRows:
    """`plan.rows`, with the permutations of the current groups of those lanes kept that were asked for.

    They take 8 bytes for each row of these groups.
    """

    def __init__(self, plan: EpochPlan) -> None:
        self._plan = plan
        if isinstance(plan, LanePlan):
            self._lanes = _LaneRows(plan)

    def __call__(self, indices: IntArray) -> IntArray:
        """Return the row (int64) of each global index, as `plan.rows` does."""
        return self._lanes(indices) if isinstance(self._plan, LanePlan) else self._plan.rows(indices)


class _LaneRows:
    """The rows of the current group of each lane, in the order of the epoch."""

    def __init__(self, plan: LanePlan) -> None:
        self._plan = plan
        self._slots = np.full(plan.lanes, -1, dtype=np.int64)  # of each lane, in what follows
        self._group = np.empty(0, dtype=np.int64)
        self._rows = np.empty((0, plan.largest_group), dtype=np.int64)

    def __call__(self, indices: IntArray) -> IntArray:
        """Return the row of each global index."""
        spots = self._plan.spots(indices)
        groups = self._plan.groups(spots)
        offsets = spots - self._plan.group_start(groups)
        lanes = np.asarray(indices, dtype=np.int64) % self._plan.lanes
        slots = self._find_slots(lanes)
        rows = np.empty(len(spots), dtype=np.int64)
        pending = np.arange(len(spots))
        while pending.size:
            # The first pending sample of each lane says which group comes next there.
            needed, first = np.unique(slots[pending], return_index=True)
            first = pending[first]
            for slot, group, lane in zip(needed.tolist(), groups[first].tolist(), lanes[first].tolist(), strict=True):
                if self._group[slot] != group:
                    self._load(slot, group, lane)
            held = groups[pending] == self._group[slots[pending]]
            ready, pending = pending[held], pending[~held]
            rows[ready] = self._rows[slots[ready], offsets[ready]]
        return rows

    def _find_slots(self, lanes: IntArray) -> IntArray:
        """Return where the group of each lane is kept, making room for lanes that are new."""
        new = np.unique(lanes[self._slots[lanes] < 0])
        if new.size:
            self._slots[new] = len(self._group) + np.arange(new.size)
            self._group = np.append(self._group, np.full(new.size, -1))
            room = np.empty((new.size, self._rows.shape[1]), dtype=np.int64)
            self._rows = np.concatenate([self._rows, room])
        return self._slots[lanes]

    def _load(self, slot: int, group: int, lane: int) -> None:
        start, stop = self._plan.group_start(np.array([group, group + 1])).tolist()
        first = start - int(self._plan.spots(np.array([lane]))[0])
        places = np.arange(first, first + stop - start, dtype=np.int64)
        self._rows[slot, : stop - start] = self._plan.rows(lane + self._plan.lanes * places)
        self._group[slot] = group
