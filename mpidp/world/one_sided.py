"""Enters: memory of every rank. Leaves: a window on it, and rows copied out of other ranks' memory by MPI's gets.

One lock epoch lasts as long as the window; a batch is its gets, neighbouring rows in one, and one flush.
"""

from collections.abc import Iterator
from typing import cast

import numpy as np

from mpidp.world.collectives import reduced
from mpidp.world.library import without_noise
from mpidp.world.mpi import MPI
from mpidp.world.shared_memory import free_shared_memory
from mpidp.world.wanted import ByteArray, Wanted

MOST_BYTES = 2**30  # of one transfer: counts are C integers


class Window:
    """A window on `memory` (uint8) of every rank, in a passive epoch from beginning to end.

    shared: whether ranks of a node can copy from it without its owner; otherwise a get waits for the owner's next
    call of MPI (in MPICH and Open MPI for as long as a step computes).
    """

    def __init__(self, comm: MPI.Intracomm, window: MPI.Win, memory: ByteArray, shared: bool) -> None:
        self.comm = comm
        self.window = window
        self.memory = memory
        self.shared = shared
        window.Lock_all(MPI.MODE_NOCHECK)

    def synchronize(self) -> None:
        """Afterwards gets see what every rank stored before. Collective."""
        self.window.Sync()
        self.comm.Barrier()
        self.window.Sync()

    def doubt(self) -> str:
        """Return why gets may miss what their target stored, or ""."""
        unified = self.window.Get_attr(MPI.WIN_MODEL) == MPI.WIN_UNIFIED
        return "" if unified else "this MPI keeps a copy of window memory of its own (MPI_WIN_SEPARATE)"

    def free(self) -> None:
        """Give the window back, and memory that MPI allocated. Collective."""
        self.memory = np.empty(0, np.uint8)
        self.window.Unlock_all()
        self.window.Free()


def make_window(comm: MPI.Intracomm, num_bytes: int) -> tuple[Window | None, str]:
    """Return a window on `num_bytes` of this rank, or None and the reason. The same on every rank; collective.

    MPI allocates the memory where the node's shared memory has room for it: ranks of a node then copy from each
    other without the target taking part. Memory of our own is reached through the target's calls of MPI.
    """
    shared = _fits_shared_memory(comm, num_bytes)
    window: Window | None = None
    problem = ""
    try:
        with without_noise():
            window = Window(comm, *_open(comm, max(1, num_bytes), shared), shared)
    except (MPI.Exception, MemoryError) as error:
        problem = f"no window can be made on rank {comm.rank}: {error}"
    problems = [found for found in comm.allgather(problem) if found]
    # A rank that has a window cannot free it alone: that would wait for the others.
    return (None, problems[0]) if problems else (window, "")


def _open(comm: MPI.Intracomm, num_bytes: int, shared: bool) -> tuple[MPI.Win, ByteArray]:
    """Return a window and the memory it is on. Collective."""
    if shared:
        window = MPI.Win.Allocate(num_bytes, 1, MPI.INFO_NULL, comm)
        return window, np.frombuffer(cast(memoryview, window.tomemory()), np.uint8)
    memory = np.empty(num_bytes, np.uint8)
    return MPI.Win.Create(memory, 1, MPI.INFO_NULL, comm), memory


class OneSided:
    """Fetches rows of `row_bytes` bytes from a window. Only the calling rank takes part."""

    def __init__(self, window: Window, row_bytes: int) -> None:
        self._window = window.window
        self._rank = window.comm.rank
        self._row_bytes = row_bytes

    def start(self, wanted: Wanted, into: ByteArray) -> None:
        """Begin to copy rows to `into`, but for this rank's own."""
        flat = into.reshape(-1)
        for rank, begin, source, count in self._transfers(wanted):
            target = (source, count, MPI.BYTE)
            self._window.Get([flat[begin : begin + count], count, MPI.BYTE], rank, target)

    def finish(self) -> None:
        """Wait until they are there."""
        self._window.Flush_all()

    def _transfers(self, wanted: Wanted) -> Iterator[tuple[int, int, int, int]]:
        """Yield (rank, first byte here, first byte there, bytes), rows that lie side by side in one."""
        begins, counts = wanted.runs()
        for begin, rows in zip(begins.tolist(), counts.tolist(), strict=True):
            rank, source = int(wanted.ranks[begin]), int(wanted.rows[begin]) * self._row_bytes
            here, left = begin * self._row_bytes, rows * self._row_bytes
            while left and rank != self._rank:
                count = min(left, MOST_BYTES)
                yield rank, here, source, count
                here, source, left = here + count, source + count, left - count


def _fits_shared_memory(comm: MPI.Intracomm, num_bytes: int) -> bool:
    """Whether every node's shared memory has room for its ranks' segments. Collective."""
    node_comm = cast(MPI.Intracomm, comm.Split_type(MPI.COMM_TYPE_SHARED))
    needed, free = reduced(node_comm, num_bytes, MPI.SUM), free_shared_memory()
    node_comm.Free()
    return bool(reduced(comm, free is None or needed <= free, MPI.LAND))
