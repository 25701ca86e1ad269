"""Enters: row numbers that this rank wants of others. Leaves: the rows, as messages of the ranks that hold them.

All ranks take part in every fetch. Numbers go by Alltoallv; rows by point-to-point messages between those ranks
that have any to exchange, so that they travel while the step computes.
"""

from collections.abc import Callable
from contextlib import suppress

import numpy as np

from mpidp.world.collectives import wait
from mpidp.world.mpi import MPI
from mpidp.world.wanted import ByteArray, IntArray, Wanted

MOST_BYTES = 2**30  # of one message: counts are C integers
LONGEST_PAUSE_S = 1e-4  # where a message is late, its sender may want the core


class AllToAll:
    """Fetches rows of `segment`s (rows, row_bytes), of which every rank holds one. Its methods are collective."""

    def __init__(self, comm: MPI.Intracomm, segment: ByteArray) -> None:
        self._comm = comm
        self._segment = segment
        self._sent = np.empty((0, segment.shape[1]), np.uint8)
        self._requests: list[MPI.Request] = []

    def start(self, wanted: Wanted, into: ByteArray) -> None:
        """Ask for rows, and begin to send those that others ask for; this rank's own are left out."""
        others = wanted.ranks != self._comm.rank
        counts = np.bincount(wanted.ranks[others], minlength=self._comm.size).astype(np.int64)
        asked = self._exchange(wanted.rows[others], counts)
        # `into` still has this rank's own rows, in their place between those of lower and of higher ranks.
        first = np.searchsorted(wanted.ranks, np.arange(self._comm.size)).tolist()
        for rank in np.flatnonzero(counts).tolist():
            self._post(self._comm.Irecv, into[first[rank] : first[rank] + int(counts[rank])], rank)
        if len(self._sent) < sum(map(len, asked)):
            self._sent = np.empty((sum(map(len, asked)), self._segment.shape[1]), np.uint8)
        start = 0
        for rank, rows in enumerate(asked):
            room = self._sent[start : start + len(rows)]
            np.take(self._segment, rows, axis=0, out=room, mode="clip")
            self._post(self._comm.Isend, room, rank)
            start += len(rows)

    def finish(self) -> None:
        """Wait until rows have come, and until those that were sent have left."""
        for request in self._requests:
            wait(request, LONGEST_PAUSE_S)
        self._requests.clear()

    def abandon(self) -> None:
        """Lets go of open messages after the communicator was revoked, because a rank died. Not collective."""
        for request in self._requests:
            with suppress(MPI.Exception):  # which is how they end, and MPI is done with the memory
                wait(request, LONGEST_PAUSE_S)
        self._requests.clear()

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
            self._requests.append(call([flat[start : start + MOST_BYTES], MPI.BYTE], rank))
