"""The mode `store`: all rows decoded once, spread over the memory of all ranks.

Each rank decodes and holds a run of the rows. MPI is called, by the thread that calls these methods and by no other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpidp.hdf5.dataset import Rows
from mpidp.hdf5.modes.node import Contents, Read, check_room
from mpidp.hdf5.order.keyed import IntArray
from mpidp.world import communicators
from mpidp.world.remote_memory import RemoteRows, Way

if TYPE_CHECKING:
    from mpidp.world.world import World


class SpreadMemory:
    """All rows, once over all ranks. Making one is collective.

    Every rank calls `rows`, or `start` and `finish`, once for each step, also for no rows: where one-sided gets are
    not trusted these are collective.

    contents: which rows. read: fills a piece (see `Contents.fill`). world: the ranks; None is this process alone.
    threads: how many call `read` at a time. way: see `RemoteRows`.

    Raises `DataError` on every rank when a node has no room, and what `read` raises on one of them.
    """

    def __init__(
        self, contents: Contents, read: Read, world: World | None = None, threads: int = 1, way: Way = "auto"
    ) -> None:
        self._contents = contents
        self._remote: RemoteRows | None = None
        self._open: tuple[IntArray, IntArray] | None = None
        ranks, rank = (1, 0) if world is None else (world.size, world.rank)
        shares = [contents.share(part, ranks) for part in range(ranks)]
        start, stop = shares[rank]
        row_bytes = contents.record.itemsize
        check_room(world, "store", (stop - start) * row_bytes)
        self._received = np.empty((0, row_bytes), np.uint8)
        if world is None:
            self._segment = np.empty((contents.num_rows, row_bytes), np.uint8)
            contents.fill(read, start, stop, self._records(self._segment), threads)
            return
        counts = np.array([stop - start for start, stop in shares], dtype=np.int64)
        self._remote = RemoteRows(world.comm, counts, row_bytes, way)
        self._segment = self._remote.segment
        try:
            with world.raise_on_all_ranks("decoding the data into memory"):
                contents.fill(read, start, stop, self._records(self._segment), threads)
        except Exception:  # on every rank, so that all of them come to the collective end
            self.close()
            raise
        self._remote.publish()

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank holds."""
        return self._segment.nbytes

    @property
    def line(self) -> str:
        """What is held and how it is fetched, in one line; the same on every rank."""
        held = f"{self._contents.num_bytes / 2**20:,.1f} MiB of decoded rows held once over all ranks"
        if self._remote is None:
            return held
        return f"{held}, fetched {self._remote.way} ({self._remote.reason})"

    def rows(self, numbers: IntArray, out: Rows) -> None:
        """Copy the values of rows `numbers` (int64, in any order) to `out`, which has room for just them."""
        self.start(numbers)
        self.finish(out)

    def start(self, numbers: IntArray) -> None:
        """Begin to fetch rows: they may travel until `finish` is called. One fetch at a time."""
        assert self._open is None, "rows were asked for before the last ones were taken"
        numbers = np.asarray(numbers, dtype=np.int64)
        assert not len(numbers) or (numbers.min() >= 0 and numbers.max() < self._contents.num_rows)
        order = np.argsort(numbers, kind="stable")
        if len(self._received) < len(numbers):
            self._received = np.empty((len(numbers), self._contents.record.itemsize), np.uint8)
        received = self._received[: len(numbers)]
        if self._remote is None:
            np.take(self._segment, numbers[order], axis=0, out=received, mode="clip")
        else:
            self._remote.start(numbers[order], received)
        self._open = numbers, order

    def finish(self, out: Rows | None) -> None:
        """Copy the rows of the last `start` to `out`, or drop them if it is None."""
        assert self._open is not None, "no rows were asked for"
        numbers, order = self._open
        self._open = None
        if self._remote is not None:
            self._remote.finish()
        if out is None:
            return
        self._contents.unpack(self._records(self._received[: len(numbers)]), out, order)
        if self._contents.all_rows:
            out.numbers[:] = numbers

    def abandon(self) -> None:
        """Let go of the memory when a rank has died, and a part of the rows with it. Not collective."""
        self._segment = self._segment[:0].copy()
        self._open = None
        if self._remote is not None:
            self._remote.abandon()
            self._remote = None

    def close(self) -> None:
        """Give the memory back. Collective."""
        if communicators.is_elastic():
            self.abandon()
            return
        self._segment = self._segment[:0].copy()  # nothing may point into the window's memory any more
        self._open = None
        if self._remote is not None:
            self._remote.free()
            self._remote = None

    def _records(self, memory: np.ndarray) -> np.ndarray:
        records: np.ndarray = memory.reshape(-1).view(self._contents.record)
        return records
