"""The mode `store`: all rows decoded once, spread over the memory of all ranks.

Each rank decodes and holds a run of the rows. MPI is called, by the thread that calls these methods and by no other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpidp.hdf5.dataset import Rows
from mpidp.hdf5.modes.memory import Contents, HeldRows, Read, Records, check_room
from mpidp.hdf5.order.keyed import IntArray
from mpidp.world.rank_memory import ByteArray, RemoteRows

if TYPE_CHECKING:
    from mpidp.world.world import World


class SpreadMemory(HeldRows):
    """All rows, once over all ranks. Making one is collective, and so are `start` and `finish`, also for no rows.

    Args:
        contents: which rows.
        read: fills a piece.
        world: the ranks.
        threads: how many call `read` at a time.

    Raises:
        DataError: on every rank: a node has no room, and what `read` raises on one of them.
    """

    may_run_ahead = False

    def __init__(self, contents: Contents, read: Read, world: World, threads: int = 1) -> None:
        super().__init__(contents)
        shares = [contents.share(part, world.size) for part in range(world.size)]
        counts = np.array([stop - start for start, stop in shares], dtype=np.int64)
        row_bytes = contents.record.itemsize
        check_room(world, "store", int(counts[world.rank]) * row_bytes)
        self._remote = RemoteRows(world.comm, counts, row_bytes)
        with world.raise_on_all_ranks("decoding the data into memory"):
            contents.fill(read, *shares[world.rank], self._records(self._remote.segment), threads)
        self._received = np.empty((0, row_bytes), np.uint8)
        self._pending: tuple[IntArray, IntArray] | None = None

    @property
    def line(self) -> str:
        """What is held, in one line; the same on every rank."""
        num_bytes = self._contents.num_rows * self._contents.record.itemsize
        return f"{num_bytes / 2**20:,.1f} MiB of decoded rows held once over all ranks, fetched by messages"

    def start(self, numbers: IntArray) -> None:
        """Begin to fetch rows: they may travel until `finish` is called. Collective."""
        order = np.argsort(numbers, kind="stable")
        if len(self._received) < len(numbers):
            self._received = np.empty((len(numbers), self._contents.record.itemsize), np.uint8)
        self._remote.start(numbers[order], self._received[: len(numbers)])
        self._pending = numbers, order

    def finish(self, out: Rows | None) -> None:
        """Copy the rows of the last `start` to `out`, or drop them if it is None. Collective."""
        assert self._pending is not None, "no rows were asked for"
        (numbers, order), self._pending = self._pending, None
        self._remote.finish()
        if out is None:
            return
        records = self._records(self._received[: len(numbers)])
        for place, field in enumerate(self._contents.fields):
            out.fields[field.name][order] = records[str(place)]
        if self._contents.all_rows:
            out.numbers[:] = numbers
        else:
            out.numbers[order] = records["number"]

    def close(self) -> None:
        """Give the memory back. Not collective; ranks may have died meanwhile."""
        self._remote.close()

    def _records(self, memory: ByteArray) -> Records:
        records: Records = memory.reshape(-1).view(self._contents.record)
        return records
