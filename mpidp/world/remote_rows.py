"""Rows of equal size spread over the memory of all ranks, fetched by messages.

Numbers go by Alltoallv; rows by point-to-point messages between those ranks that have any to exchange, so that they
travel while the step computes. MPI is called by the thread that calls these methods, and by no other.
"""

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from mpidp.world.collectives import wait
from mpidp.world.communicators import keep_at_loss
from mpidp.world.mpi import MPI

IntArray = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]

TAG = 7003
MOST_BYTES = 2**30  # of one message: counts are C integers
LONGEST_PAUSE_S = 1e-4  # where a message is late, its sender may need the core


class _Open(list[MPI.Request]):
    """Messages under way, which hold the memory that they use."""


class RemoteRows:
    """Rows over all ranks, numbered from rank 0's first to the last rank's last.

    First fill `segment`, on all ranks, then fetch; rows must not change afterwards. Fetching is collective: every rank
    calls `start` and `finish` equally often, also for no rows. Making and dropping one is not collective.

    Attributes:
        segment: this rank's rows, uint8 (rows_per_rank[rank], row_bytes).

    Args:
        comm: the ranks, of which nobody else sends messages with this module's tag.
        rows_per_rank: int64, the same on all ranks; some may be 0.
        row_bytes: size of a row, at least 1.
    """

    def __init__(self, comm: MPI.Intracomm, rows_per_rank: IntArray, row_bytes: int) -> None:
        assert len(rows_per_rank) == comm.size and row_bytes >= 1
        self._comm = comm
        self._ends = np.cumsum(rows_per_rank, dtype=np.int64)
        self._starts = self._ends - rows_per_rank
        self.segment: ByteArray = np.empty((int(rows_per_rank[comm.rank]), row_bytes), np.uint8)
        self._sent = np.empty((0, row_bytes), np.uint8)
        self._requests = _Open()
        keep_at_loss(self._requests)

    @property
    def num_rows(self) -> int:
        """Rows of all ranks."""
        return int(self._ends[-1])

    def start(self, rows: IntArray, into: ByteArray) -> None:
        """Begin to copy rows to `into`, which `finish` ends: they may travel in between. One fetch at a time.

        Args:
            rows: int64 numbers over all ranks, ascending; a row may come several times.
            into: uint8 (len(rows), row_bytes), contiguous.
        """
        assert not self._requests, "a fetch was started before the last one was finished"
        assert into.shape == (len(rows), self.segment.shape[1]) and into.flags.c_contiguous
        assert not len(rows) or (rows[0] >= 0 and rows[-1] < self.num_rows), "a row outside the data"
        rank, size = self._comm.rank, self._comm.size
        edges = [0, *np.searchsorted(rows, self._ends).tolist()]
        own = slice(edges[rank], edges[rank + 1])
        # With mode="raise" NumPy would go through a buffer of its own.
        np.take(self.segment, rows[own] - self._starts[rank], axis=0, out=into[own], mode="clip")
        if size == 1:
            return
        counts = np.diff(edges).astype(np.int64)
        counts[rank] = 0
        asked = self._exchange(np.delete(rows - np.repeat(self._starts, np.diff(edges)), own), counts)
        for other in np.flatnonzero(counts).tolist():
            self._post(self._comm.Irecv, into[edges[other] : edges[other + 1]], other)
        if len(self._sent) < sum(map(len, asked)):
            self._sent = np.empty((sum(map(len, asked)), self.segment.shape[1]), np.uint8)
        begin = 0
        for other, wanted in enumerate(asked):
            room = self._sent[begin : begin + len(wanted)]
            np.take(self.segment, wanted, axis=0, out=room, mode="clip")
            self._post(self._comm.Isend, room, other)
            begin += len(wanted)

    def finish(self) -> None:
        """Return when the rows of the last `start` are there, and those that others asked for have left."""
        for request in self._requests:
            wait(request, LONGEST_PAUSE_S)
        self._requests.clear()

    def close(self) -> None:
        """Give the memory back, when what is under way has ended. Not collective; ranks may have died meanwhile."""
        for request in self._requests:
            with suppress(MPI.Exception):  # how it ends where a rank has died; MPI is done with the memory then
                wait(request, LONGEST_PAUSE_S)
        self._requests.clear()
        self.segment = self.segment[:0].copy()

    def _exchange(self, rows: IntArray, counts: IntArray) -> list[IntArray]:
        """Return the row numbers that each rank wants of this one; `counts` of `rows` are wanted of each."""
        theirs = np.empty_like(counts)
        self._comm.Alltoall(counts, theirs)
        asked = np.empty(int(theirs.sum()), np.int64)
        self._comm.Alltoallv([rows, counts, MPI.INT64_T], [asked, theirs, MPI.INT64_T])
        return np.split(asked, np.cumsum(theirs)[:-1])

    def _post(self, call: Callable[..., MPI.Request], rows: ByteArray, rank: int) -> None:
        flat = rows.reshape(-1)
        for start in range(0, len(flat), MOST_BYTES):
            self._requests.append(call([flat[start : start + MOST_BYTES], MPI.BYTE], rank, TAG))
