"""Memory of other ranks: shared by the ranks of a node, and rows that are fetched by messages.

For shared memory each rank makes an anonymous file in memory and the others of its node map it. A mapping lives as long
as some tensor refers to it, so no tensor ever points to unmapped memory, and dropping it is not collective. It takes no
room of /dev/shm, which is small in containers, and leaves nothing behind when a job is killed.

Of rows that are spread over all ranks, numbers go by Alltoallv; rows by point-to-point messages between those ranks
that have any to exchange, so that they travel while the step computes. MPI is called by the thread that calls these
methods, and by no other.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mpidp.world.collectives import wait
from mpidp.world.library import mapped_files, read_maps
from mpidp.world.mpi import MPI, keep_at_loss, reduced

log = logging.getLogger("mpidp.rank")

PAGE_BYTES = 4096
CROWDED_PAUSE_S = 1e-4

# MPICH 4 and 5. Memory of windows has lost its name by the time that they can be used.
_NAMES = re.compile(r"/dev/shm/mpich_shm_[0-9a-f]+_\d+")


class SharedWindow:
    """Equal segments of node-shared memory, one for each rank of the node. Construction is collective on the node.

    Attributes:
        segments: one uint8 tensor a rank of the node, page-aligned and zeroed; all alias the same memory everywhere.

    Args:
        node_comm: the ranks of this node.
        num_bytes: size of one segment; the same on every rank.

    Raises:
        OSError: on all ranks of the node; one of them cannot make its segment, or see that of another.
    """

    def __init__(self, node_comm: MPI.Intracomm, num_bytes: int):
        self._comm = node_comm
        # A rank in a Barrier keeps its core busy; with more ranks than cores it would slow down one that still works.
        cores = frozenset[int]().union(*node_comm.allgather(os.sched_getaffinity(0)))
        self._crowded = node_comm.size > len(cores)
        size = -(-max(num_bytes, 1) // PAGE_BYTES) * PAGE_BYTES
        self.segments: Sequence[Tensor] = [
            torch.frombuffer(mapped, dtype=torch.uint8) for mapped in _map_all(node_comm, size)
        ]
        self.segments[node_comm.rank].zero_()  # the first touch, by the rank whose gradients will lie there
        self.synchronize()

    def synchronize(self, pause_s: float = 0.0) -> None:
        """Afterwards every rank of the node sees what all of them stored before. Collective on the node.

        Args:
            pause_s: seconds to sleep between two tests, where others need the core; 0 keeps it busy.
        """
        # The barrier's own messages go through shared memory, so they order stores and loads around it as well.
        if self._crowded or pause_s:
            wait(self._comm.Ibarrier(), pause_s or CROWDED_PAUSE_S)
        else:
            self._comm.Barrier()

    def free(self) -> None:
        """Drops the memory, which is unmapped when no tensor refers to it any more. Not collective."""
        self.segments = ()


def _map_all(node_comm: MPI.Intracomm, size: int) -> list[mmap.mmap]:
    """The segments of all ranks of the node; OSError on all of them if one fails. Collective on the node."""
    error: OSError | None = None
    own, mapped = -1, list[mmap.mmap]()
    try:
        own = os.memfd_create("mpidp", os.MFD_CLOEXEC)
        os.ftruncate(own, size)
    except OSError as caught:
        error = caught
    files: list[str] = node_comm.allgather(f"/proc/{os.getpid()}/fd/{own}")
    try:
        if error is None:
            mapped = [_map(file, size) for file in files]
    except OSError as caught:
        error = caught
    are_mapped = reduced(node_comm, error is None, MPI.LAND)  # on all ranks, so the files may be closed
    if own >= 0:
        os.close(own)
    if not are_mapped:
        raise error or OSError("another rank of this node cannot map the shared memory")
    return mapped


def _map(file: str, size: int) -> mmap.mmap:
    descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def shared_files(maps: str) -> list[str]:
    """The files in /dev/shm that MPICH has mapped, from the text of `/proc/self/maps`. Pure."""
    return [path for path in mapped_files(maps) if _NAMES.fullmatch(path)]


def forget_names(node_comm: MPI.Intracomm) -> None:
    """Removes the names of MPICH's files in /dev/shm, when every rank has the memory. Collective on the node.

    MPICH removes them when MPI ends, which a killed job never does: megabytes would stay in use. The memory itself
    lasts as long as a process has it mapped.
    """
    node_comm.Barrier()
    if node_comm.rank != 0:
        return
    for path in shared_files(read_maps()):
        try:
            os.unlink(path)
        except OSError as error:  # harmless: the file only stays behind
            log.info("cannot remove the name of %s: %s", path, error)


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
