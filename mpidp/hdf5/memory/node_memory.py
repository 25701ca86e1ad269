"""Enters: the rows of a data set. Leaves: their values, from one decoded copy in the memory of each node.

The ranks of a node decode a share of the rows each, into memory that all of them see.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np

from mpidp.errors import DataError
from mpidp.hdf5.files.dataset import Rows
from mpidp.hdf5.memory.contents import Contents, Read, Records
from mpidp.hdf5.memory.room import check_room
from mpidp.hdf5.order.keyed import IntArray
from mpidp.world.window import SharedWindow

if TYPE_CHECKING:
    from mpidp.world.world import World


class NodeMemory:
    """All rows, once a node. Making one is collective.

    Fetching is not collective, calls no MPI, and may happen in any thread.

    contents: which rows. read: fills a piece (see `Contents.fill`). world: the ranks; None is this process alone.
    threads: how many call `read` at a time.

    Raises `DataError` on every rank when a node has no room, and what `read` raises on one of them.
    """

    def __init__(self, contents: Contents, read: Read, world: World | None = None, threads: int = 1) -> None:
        self._contents = contents
        self._ranks, self._rank = (1, 0) if world is None else (world.local_size, world.local_rank)
        self._window: SharedWindow | None = None
        self._pending: IntArray | None = None
        start, stop = contents.share(self._rank, self._ranks)
        largest = -(-contents.num_rows // self._ranks) * contents.record.itemsize
        check_room(world, "node", largest)
        self._starts = np.array([contents.share(rank, self._ranks)[0] for rank in range(self._ranks)], dtype=np.int64)
        self._segments: list[Records] = []
        try:
            if world is not None and world.size > 1:
                self._window = _share(world, largest)
            self._segments = self._views()
            with nullcontext() if world is None else world.together("decoding the data into memory"):
                contents.fill(read, start, stop, self._segments[self._rank], threads)
        except Exception:  # on every rank, so that all of them come to the collective end
            self.close()
            raise
        if self._window is not None:
            self._window.synchronize()

    @property
    def num_bytes(self) -> int:
        """Bytes that this node holds."""
        return sum(segment.nbytes for segment in self._segments)

    @property
    def line(self) -> str:
        """What is held, in one line."""
        return f"{self.num_bytes / 2**20:,.1f} MiB of decoded rows held once a node, read by its {self._ranks} rank(s)"

    def rows(self, numbers: IntArray, out: Rows) -> None:
        """Copy the values of rows `numbers` (int64, in any order) to `out`, which has room for just them."""
        self.start(numbers)
        self.finish(out)

    def start(self, numbers: IntArray) -> None:
        """Say which rows `finish` will want; for memory on the node there is nothing to begin."""
        assert self._pending is None, "rows were asked for before the last ones were taken"
        self._pending = np.asarray(numbers, dtype=np.int64)

    def finish(self, out: Rows | None) -> None:
        """Copy the rows of the last `start` to `out`, or drop them if it is None."""
        numbers, self._pending = self._pending, None
        assert numbers is not None, "no rows were asked for"
        if out is None:
            return
        assert not len(numbers) or (numbers.min() >= 0 and numbers.max() < self._contents.num_rows)
        ranks = np.searchsorted(self._starts, numbers, side="right") - 1
        for rank in np.unique(ranks).tolist():
            where = np.flatnonzero(ranks == rank)
            self._copy(self._segments[rank], numbers[where] - self._starts[rank], out, where)
        if self._contents.all_rows:
            out.numbers[:] = numbers

    def abandon(self) -> None:
        """Forget what was asked for. The rows of a rank that died stay in the node's memory. Not collective."""
        self._pending = None

    def close(self) -> None:
        """Give the memory back."""
        self._segments, self._pending, self._window = [], None, None

    def _copy(self, segment: Records, rows: IntArray, out: Rows, where: IntArray) -> None:
        for place, field in enumerate(self._contents.fields):
            out.fields[field.name][where] = segment[str(place)][rows]
        if not self._contents.all_rows:
            out.numbers[where] = segment["number"][rows]

    def _views(self) -> list[Records]:
        """Return the rows that each local rank decodes."""
        if self._window is None:
            return [np.empty(self._contents.num_rows, self._contents.record)]
        views = []
        for rank, segment in enumerate(self._window.segments):
            start, stop = self._contents.share(rank, self._ranks)
            views.append(segment.numpy()[: (stop - start) * self._contents.record.itemsize].view(self._contents.record))
        return views


def _share(world: World, num_bytes: int) -> SharedWindow | None:
    """Return memory that the ranks of a node share, or None for a rank that is alone there. Collective.

    Raises `DataError` on all ranks when those of one node cannot share memory.
    """
    window: SharedWindow | None = None
    error: OSError | None = None
    # All ranks of a node fail together, but those of other nodes do not know.
    try:
        window = SharedWindow(world.node_comm, num_bytes) if world.local_size > 1 else None
    except OSError as caught:
        error = caught
    failure = error and f"{world.host}: the ranks of a node cannot share {num_bytes:,} bytes ({error})"
    failures = [found for found in world.comm.allgather(failure) if found]
    with world.together("sharing memory"):
        if failures:
            raise DataError(f'mode="node": {failures[0]}; take mode="store" or mode="stream"')
    return window
