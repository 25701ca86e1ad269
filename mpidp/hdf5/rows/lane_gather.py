"""Enters: the global indices that a rank reads, step after step, in lanes. Leaves: the values of their rows.

The current group of every lane of this rank is held decoded, and the groups that will be needed next are
decoded ahead by threads, in the order in which they will be needed.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass

import numpy as np

from mpidp.hdf5.files.dataset import Rows
from mpidp.hdf5.order.keyed import IntArray
from mpidp.hdf5.order.plan import LanePlan
from mpidp.hdf5.rows.pieces import PieceReader
from mpidp.world.status import status


class GroupStore:
    """Room for `count` groups of up to `capacity` rows in one block of memory, and the threads that fill it."""

    def __init__(self, reader: PieceReader, pool: Executor, count: int, capacity: int) -> None:
        self._reader = reader
        self._pool = pool
        self.capacity = capacity
        self._free = deque(range(count))
        self.held = reader.empty(count * capacity)

    @property
    def has_room(self) -> bool:
        """Whether one more group can be read."""
        return bool(self._free)

    def start(self, plan: LanePlan, number: int) -> tuple[int, Future[IntArray]]:
        """Read a group in a thread; return its place and, in time, where in `held` its rows lie, permuted."""
        place = self._free.popleft()
        return place, self._pool.submit(self._fill, plan, number, place)

    def release(self, place: int) -> None:
        """Give back the room of a group."""
        self._free.append(place)

    def _fill(self, plan: LanePlan, number: int, place: int) -> IntArray:
        group = plan.group(number)
        first = start = place * self.capacity
        with status.working("read chunks"):
            for piece in group.pieces:
                stop = start + piece.stop - piece.start
                self._reader.read(piece, self.held.view(start, stop))
                start = stop
        return group.permutation + first


@dataclass(frozen=True)
class _Wanted:
    """A group that this rank needs, from the global index `first` on, in `slot`."""

    first: int
    slot: int
    number: int


class LaneGatherer:
    """Gathers the steps of one epoch, from the one at `position` to the one that stops at `end`, in order.

    A lane's *slot* is its number among the lanes of this rank. Groups are started in the order of the first
    index that needs them, and a group takes over from the one that its slot held. So when the next group in
    that order is waited for, at most one group a slot is held, and a store with room for one more cannot stall.
    """

    def __init__(self, plan: LanePlan, store: GroupStore, size: int, rank: int, position: int, end: int) -> None:
        self._plan = plan
        self._store = store
        self._size = size
        slots = number_of_slots(plan.lanes, size, rank)
        self._number = np.full(slots, -1, dtype=np.int64)  # of the group that a slot holds
        self._place = [-1] * slots  # of that group in the store
        self._rows = np.empty((slots, store.capacity), dtype=np.int64)  # where its rows lie in the store
        self._wanted = deque(_wanted(plan, size, rank, position, end))
        self._started: deque[tuple[_Wanted, int, Future[IntArray]]] = deque()

    def start_ahead(self) -> bool:
        """Start groups while there is room; return whether all of the epoch are started."""
        while self._wanted and self._store.has_room:
            wanted = self._wanted.popleft()
            self._started.append((wanted, *self._store.start(self._plan, wanted.number)))
        return not self._wanted

    def gather(self, indices: IntArray, into: Rows) -> None:
        """Fill `into` with the rows of the global `indices`, ascending, which follow those of the last call."""
        spots = self._plan.spots(indices)
        groups = self._plan.groups(spots)
        offsets = spots - self._plan.group_start(groups)
        slots = indices % self._plan.lanes // self._size
        pending = np.arange(len(indices))
        while pending.size:
            held = groups[pending] == self._number[slots[pending]]
            ready, pending = pending[held], pending[~held]
            into.take_from(self._store.held, self._rows[slots[ready], offsets[ready]], ready)
            if pending.size:
                self._turn_over(int(indices[pending[-1]]))

    def release(self) -> None:
        """Give back all room, at the end of the epoch."""
        assert not self._started
        for place in self._place:
            if place >= 0:
                self._store.release(place)

    def _turn_over(self, last: int) -> None:
        """Let slots take up the groups needed next, up to the index `last`, one a slot."""
        taken: set[int] = set()
        while self._started or self._wanted:
            wanted = self._started[0][0] if self._started else self._wanted[0]
            if wanted.first > last or wanted.slot in taken:
                return
            # Every row of the old group comes before this one is needed, so it was handed out.
            if self._place[wanted.slot] >= 0:
                self._store.release(self._place[wanted.slot])
            self.start_ahead()
            _, place, reading = self._started.popleft()
            rows = reading.result()
            self._place[wanted.slot], self._number[wanted.slot] = place, wanted.number
            self._rows[wanted.slot, : len(rows)] = rows
            taken.add(wanted.slot)


def number_of_slots(lanes: int, size: int, rank: int) -> int:
    """Return how many lanes a rank reads: lanes rank, rank + size, ...; with more ranks than lanes, a shared one."""
    return len(range(rank % lanes, lanes, size))


def _wanted(plan: LanePlan, size: int, rank: int, position: int, end: int) -> Iterator[_Wanted]:
    """Yield the groups that a rank needs in [position, end), in the order of the first index that needs them."""
    lanes = range(rank % plan.lanes, plan.lanes, size)
    # Of a shared lane, this rank takes places share, share + sharers, ...
    sharers = max(1, len(range(rank % plan.lanes, size, plan.lanes)))
    share = rank // plan.lanes if size > plan.lanes else 0
    found = []
    for slot, lane in enumerate(lanes):
        groups, starts, stops = plan.lane_groups(lane)
        earliest = np.maximum(starts, max(0, -((lane - position) // plan.lanes)))
        places = earliest + (share - earliest) % sharers
        needed = (places < stops) & (places * plan.lanes + lane < end)
        indices = places[needed] * plan.lanes + lane
        found.append(np.stack([indices, np.full_like(indices, slot), groups[needed]]))
    table = np.concatenate(found, axis=1)
    for first, slot, number in table[:, np.argsort(table[0], kind="stable")].T:
        yield _Wanted(int(first), int(slot), int(number))
