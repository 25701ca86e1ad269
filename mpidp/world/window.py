"""A number of bytes in, memory that all ranks of a node can read and write out."""

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from mpidp.world.mpi import MPI
from mpidp.world.noise import without_noise
from mpidp.world.scalar import reduced
from mpidp.world.waiting import wait

PAGE_BYTES = 4096
SHARED_MEMORY = "/dev/shm"
CROWDED_PAUSE_S = 1e-4


class SharedWindow:
    """Equal segments of node-shared memory, one for each rank of the node. Construction is collective on the node.

    It is freed by `free`, or with the process: freeing is collective, which a garbage collector cannot be.

    Attributes:
        segments: one uint8 tensor a rank of the node, page-aligned and zeroed; all alias the same memory everywhere.

    Args:
        node_comm: the ranks of this node.
        num_bytes: size of one segment; the same on every rank.
    """

    def __init__(self, node_comm: MPI.Intracomm, num_bytes: int):
        self._comm = node_comm
        # A rank in a Barrier keeps its core busy; with more ranks than cores it keeps it from one that still works.
        cores = frozenset[int]().union(*node_comm.allgather(os.sched_getaffinity(0)))
        self._crowded = node_comm.size > len(cores)
        # Segments need not be neighbours: each may then lie in the memory nearest to its rank.
        info = MPI.Info.Create({"alloc_shared_noncontig": "true"})
        size = -(-max(num_bytes, 1) // PAGE_BYTES) * PAGE_BYTES
        self._window = _allocate(node_comm, size, info)
        info.Free()
        self.segments: Sequence[Tensor] = [
            torch.frombuffer(self._window.Shared_query(rank)[0], dtype=torch.uint8) for rank in range(node_comm.size)
        ]
        # One passive epoch for the whole life. In it, load and store are allowed, and Sync orders them.
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self.segments[node_comm.rank].zero_()  # the first touch, by the rank whose gradients will lie there
        self.synchronize()

    def synchronize(self, pause_s: float = 0.0) -> None:
        """Afterwards every rank of the node sees what all of them stored before. Collective on the node.

        In MPI's unified memory model stores become visible "eventually"; Win.Sync is the memory barrier that makes
        those before it visible, the Barrier orders the ranks, and the second Sync keeps later loads from being taken
        from before it.

        Args:
            pause_s: how long to sleep between two looks, where the core is wanted by others; 0 keeps it.
        """
        self._window.Sync()
        if self._crowded or pause_s:
            wait(self._comm.Ibarrier(), pause_s or CROWDED_PAUSE_S)
        else:
            self._comm.Barrier()
        self._window.Sync()

    def free(self) -> None:
        """Gives the memory back; no tensor may point into it any more. Collective on the node."""
        self.segments = ()
        self._window.Unlock_all()
        self._window.Free()


def _allocate(node_comm: MPI.Intracomm, size: int, info: MPI.Info) -> MPI.Win:
    """The window, or MPI.Exception on every rank of the node if one of them cannot have it. Collective on the node."""
    window: MPI.Win | None = None
    error: MPI.Exception | None = None
    try:
        with without_noise():
            window = MPI.Win.Allocate_shared(size, 1, info, node_comm)
    except MPI.Exception as caught:
        error = caught
    if not reduced(node_comm, window is not None, MPI.LAND):
        raise error or MPI.Exception(MPI.ERR_RMA_SHARED)
    assert window is not None
    return window


def free_shared_memory() -> int | None:
    """Bytes left for shared memory on this node; None where it cannot be asked. Not collective."""
    if not os.path.isdir(SHARED_MEMORY):
        return None
    facts = os.statvfs(SHARED_MEMORY)
    return facts.f_bavail * facts.f_frsize
