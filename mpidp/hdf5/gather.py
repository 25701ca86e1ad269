"""Gathering the rows of a step: by streams, with threads that decode groups ahead, or in any order of rows."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from mpidp.hdf5.dataset import Rows
from mpidp.hdf5.plan import IntArray, Piece, StreamPlan
from mpidp.hdf5.read import Cache, RowReader
from mpidp.world.status import status


class GroupStore:
    """Room for `count` groups of up to `capacity` rows in one block of memory, and the threads that fill it."""

    def __init__(self, reader: RowReader, pool: Executor, count: int, capacity: int) -> None:
        self._reader = reader
        self._pool = pool
        self.capacity = capacity
        self._free = deque(range(count))
        self.held = reader.empty(count * capacity)

    @property
    def has_room(self) -> bool:
        """Whether one more group can be read."""
        return bool(self._free)

    def start(self, plan: StreamPlan, number: int) -> tuple[int, Future[IntArray]]:
        """Read a group in a thread; return its place and, in time, where in `held` its rows lie, permuted."""
        place = self._free.popleft()
        return place, self._pool.submit(self._fill, plan, number, place)

    def release(self, place: int) -> None:
        """Give back the room of a group."""
        self._free.append(place)

    def _fill(self, plan: StreamPlan, number: int, place: int) -> IntArray:
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


class StreamGatherer:
    """Gathers the steps of one epoch, from the one at `position` to the one that stops at `end`, in order.

    A stream's *slot* is its number among the streams of this rank; it holds one decoded group. Groups are read in the
    order of the first index that needs them, so a store with room for one group more than there are slots cannot stall.
    """

    def __init__(self, plan: StreamPlan, store: GroupStore, size: int, rank: int, position: int, end: int) -> None:
        self._plan = plan
        self._store = store
        self._size = size
        slots = number_of_slots(plan.streams, size, rank)
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
        slots = indices % self._plan.streams // self._size
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


def number_of_slots(streams: int, size: int, rank: int) -> int:
    """Return how many streams a rank reads: rank, rank + size, ...; with more ranks than streams, a shared one."""
    return len(range(rank % streams, streams, size))


def _wanted(plan: StreamPlan, size: int, rank: int, position: int, end: int) -> Iterator[_Wanted]:
    """Yield the groups that a rank needs in [position, end), in the order of the first index that needs them."""
    streams = range(rank % plan.streams, plan.streams, size)
    # Of a shared stream, this rank takes places share, share + sharers, ...
    sharers = max(1, len(range(rank % plan.streams, size, plan.streams)))
    share = rank // plan.streams if size > plan.streams else 0
    found = []
    for slot, stream in enumerate(streams):
        groups, starts, stops = plan.stream_groups(stream)
        earliest = np.maximum(starts, max(0, -((stream - position) // plan.streams)))
        places = earliest + (share - earliest) % sharers
        needed = (places < stops) & (places * plan.streams + stream < end)
        indices = places[needed] * plan.streams + stream
        found.append(np.stack([indices, np.full_like(indices, slot), groups[needed]]))
    table = np.concatenate(found, axis=1)
    for first, slot, number in table[:, np.argsort(table[0], kind="stable")].T:
        yield _Wanted(int(first), int(slot), int(number))


class RowGatherer:
    """Reads the rows of a step, in any order; for any number of threads.

    Chunks are decoded whole and the last ones kept, up to `most_bytes`, or all with `keep_all` if they fit. Where
    nothing is encoded, only the rows that are needed are read. `room` gives memory for the rows of a chunk.
    """

    def __init__(self, reader: RowReader, most_bytes: int, keep_all: bool, room: Callable[[int], Rows]) -> None:
        self._reader = reader
        self._room = room
        self._edges = np.concatenate(([0], np.cumsum(reader.selection.chunk_rows)))
        self._chunks: Cache[int, Rows] = Cache(most_bytes, lambda rows: rows.num_bytes)
        num_rows = int(self._edges[-1])
        fits = num_rows * (reader.selection.dataset.row_bytes + 8) <= most_bytes
        self._all = reader.empty(num_rows) if keep_all and fits else None
        self._is_there = np.zeros(len(self._edges) - 1, dtype=np.bool_)

    def parts(self, rows: IntArray, most: int) -> list[IntArray]:
        """Return the places of the selected `rows` in up to `most` parts, for a thread each; none cuts a chunk."""
        if self._all is not None or most == 1 or not len(rows):
            return [np.arange(len(rows))]
        order, _, cuts = self._by_chunk(rows)
        edges = [int(cuts[(len(cuts) - 1) * part // most]) for part in range(most + 1)]
        return [order[a:b] for a, b in pairwise(edges) if a < b]

    def gather(self, rows: IntArray, where: IntArray, into: Rows) -> None:
        """Fill the places `where` of `into` with those of the selected `rows`."""
        if self._all is not None:
            self._bring(np.searchsorted(self._edges, rows[where], side="right") - 1, self._all)
            into.take_from(self._all, rows[where], where)
            return
        order, chunks, cuts = self._by_chunk(rows[where])
        for a, b in pairwise(cuts.tolist()):
            chunk, places = int(chunks[a]), where[order[a:b]]
            self._chunk_rows(chunk, places, rows[places] - self._edges[chunk], into)

    def _by_chunk(self, rows: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Return places of ascending rows, the chunk of each, and where in these another chunk begins, ends added."""
        order = np.argsort(rows, kind="stable")
        chunks = np.searchsorted(self._edges, rows[order], side="right") - 1
        return order, chunks, np.flatnonzero(np.diff(chunks, prepend=-1, append=-1))

    @property
    def holds_all(self) -> bool:
        """Whether every chunk has been decoded and is kept."""
        return self._all is not None and bool(self._is_there.all())

    def _bring(self, chunks: IntArray, everything: Rows) -> None:
        """Decode those of `chunks` that are not there yet; another thread may be decoding some of them."""
        for chunk in np.unique(chunks[~self._is_there[chunks]]).tolist():
            start, stop = int(self._edges[chunk]), int(self._edges[chunk + 1])
            self._chunks.get(chunk, partial(self._read_into, chunk, everything.view(start, stop)))
            self._is_there[chunk] = True

    def _read_into(self, chunk: int, rows: Rows) -> Rows:
        self._reader.read(Piece(chunk, 0, len(rows.numbers)), rows)
        return rows

    def _chunk_rows(self, chunk: int, where: IntArray, offsets: IntArray, into: Rows) -> None:
        """Fill the places `where` of `into` with rows of a chunk: ascending `offsets`."""
        height = int(self._edges[chunk + 1] - self._edges[chunk])
        if len(offsets) == height and _is_run(where):
            self._reader.read(Piece(chunk, 0, height), into.view(int(where[0]), int(where[0]) + height))
        elif self._reader.reads_single_rows(chunk):
            self._single_rows(chunk, where, offsets, into)
        else:
            kept = self._chunks.get(chunk, lambda: self._read_into(chunk, self._room(height)))
            into.take_from(kept, offsets, where)

    def _single_rows(self, chunk: int, where: IntArray, offsets: IntArray, into: Rows) -> None:
        """Read each run of rows by itself."""
        edges = [0, len(offsets)]
        if len(offsets) > 1:
            edges[1:1] = (np.flatnonzero((np.diff(offsets) != 1) | (np.diff(where) != 1)) + 1).tolist()
        for a, b in pairwise(edges):
            piece = Piece(chunk, int(offsets[a]), int(offsets[b - 1]) + 1)
            self._reader.read(piece, into.view(int(where[a]), int(where[a]) + b - a))


def _is_run(where: IntArray) -> bool:
    return len(where) == 1 or bool((np.diff(where) == 1).all())
