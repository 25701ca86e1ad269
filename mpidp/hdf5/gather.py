"""Enters: the global indices that a rank reads, step after step. Leaves: the values of their rows.

One gatherer for each kind of plan, each reading as few bytes as its order allows.
"""

from collections import OrderedDict
from typing import Protocol

import numpy as np

from mpidp.hdf5.dataset import Rows
from mpidp.hdf5.keyed import IntArray
from mpidp.hdf5.lanes import LanePlan, Piece
from mpidp.hdf5.pieces import PieceReader
from mpidp.hdf5.plan import EpochPlan, FullPlan

MOST_DECODED_BYTES = 256 * 2**20


class Gatherer(Protocol):
    """Turns a rank's indices of a step, ascending, into rows in that order."""

    def gather(self, indices: IntArray) -> Rows:
        """Return the rows of `indices`."""


def gatherer(plan: EpochPlan, reader: PieceReader, size: int, rank: int) -> Gatherer:
    """Return the gatherer for a plan."""
    if isinstance(plan, LanePlan):
        return LaneGatherer(plan, reader, size, rank)
    if isinstance(plan, FullPlan):
        return FullGatherer(plan, reader)
    return RunGatherer(reader)


class LaneGatherer:
    """Holds the current group of each lane of a rank in one block of memory, so that a batch is one take."""

    def __init__(self, plan: LanePlan, reader: PieceReader, size: int, rank: int) -> None:
        self._plan = plan
        self._reader = reader
        self._size = size
        # Lanes rank, rank + size, ...: lane l sits in slot l // size. With more ranks than lanes, one slot.
        slots = len(range(rank % plan.lanes, plan.lanes, size))
        self._capacity = plan.largest_group
        self._held = reader.empty(slots * self._capacity)
        self._group = np.full(slots, -1, dtype=np.int64)
        self._permuted = np.empty((slots, self._capacity), dtype=np.int64)

    def gather(self, indices: IntArray) -> Rows:
        """Return the rows of `indices`, reading a group when its lane comes to it."""
        spots = self._plan.spots(indices)
        groups = self._plan.groups(spots)
        offsets = spots - self._plan.group_start(groups)
        slots = indices % self._plan.lanes // self._size
        batch = self._reader.empty(len(indices))
        pending = np.arange(len(indices))
        while pending.size:
            # Places ascend within a lane, so the first pending sample of each lane is in its next group.
            needed, first = np.unique(slots[pending], return_index=True)
            for slot, group in zip(needed.tolist(), groups[pending[first]].tolist(), strict=True):
                if self._group[slot] != group:
                    self._load(slot, group)
            held = groups[pending] == self._group[slots[pending]]
            ready, pending = pending[held], pending[~held]
            rows = self._held.take(self._permuted[slots[ready], offsets[ready]])
            if len(ready) == len(indices):
                return rows
            batch.put(ready, rows)
        return batch

    def _load(self, slot: int, number: int) -> None:
        group = self._plan.group(number)
        start = slot * self._capacity
        self._permuted[slot, : len(group.permutation)] = start + group.permutation
        for piece in group.pieces:
            stop = start + piece.stop - piece.start
            self._reader.read(piece, self._held.view(start, stop))
            start = stop
        self._group[slot] = number


class RunGatherer:
    """Reads a run of rows as it lies in the file, chunk by chunk; HDF5's chunk cache keeps the last chunk."""

    def __init__(self, reader: PieceReader) -> None:
        self._reader = reader
        self._edges = np.concatenate(([0], np.cumsum(reader.selection.chunk_rows)))

    def gather(self, indices: IntArray) -> Rows:
        """Return the rows of `indices`, which follow each other."""
        batch = self._reader.empty(len(indices))
        done = 0
        while done < len(indices):
            row = int(indices[done])
            chunk = int(np.searchsorted(self._edges, row, side="right")) - 1
            begin, end = int(self._edges[chunk]), int(self._edges[chunk + 1])
            count = min(len(indices) - done, end - row)
            piece = Piece(chunk, row - begin, row - begin + count)
            self._reader.read(piece, batch.view(done, done + count))
            done += count
        return batch


class FullGatherer:
    """Reads rows in any order: whole chunks, kept while there is room, or just the span that is needed."""

    def __init__(self, plan: FullPlan, reader: PieceReader, most_bytes: int = MOST_DECODED_BYTES) -> None:
        self._plan = plan
        self._reader = reader
        self._most_bytes = most_bytes
        self._edges = np.concatenate(([0], np.cumsum(reader.selection.chunk_rows)))
        self._chunked = any(file.chunked for file in reader.selection.dataset.files)
        self._decoded: OrderedDict[int, Rows] = OrderedDict()
        self._decoded_bytes = 0

    def gather(self, indices: IntArray) -> Rows:
        """Return the rows of `indices`."""
        rows = self._plan.rows(indices)
        chunks = np.searchsorted(self._edges, rows, side="right") - 1
        batch = self._reader.empty(len(indices))
        for chunk in np.unique(chunks).tolist():
            where = np.flatnonzero(chunks == chunk)
            offsets = rows[where] - self._edges[chunk]
            if self._chunked:
                batch.put(where, self._chunk(chunk).take(offsets))
            else:
                low = int(offsets.min())
                batch.put(where, self._read(Piece(chunk, low, int(offsets.max()) + 1)).take(offsets - low))
        return batch

    def _chunk(self, chunk: int) -> Rows:
        if chunk not in self._decoded:
            decoded = self._read(Piece(chunk, 0, int(self._edges[chunk + 1] - self._edges[chunk])))
            self._decoded_bytes += decoded.num_bytes
            while self._decoded and self._decoded_bytes > self._most_bytes:
                self._decoded_bytes -= self._decoded.popitem(last=False)[1].num_bytes
            self._decoded[chunk] = decoded
        self._decoded.move_to_end(chunk)
        return self._decoded[chunk]

    def _read(self, piece: Piece) -> Rows:
        rows = self._reader.empty(piece.stop - piece.start)
        self._reader.read(piece, rows)
        return rows
