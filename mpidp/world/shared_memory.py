"""Shared memory of the ranks of a node.

Each rank makes an anonymous file in memory and the others of its node map it. A mapping lives as long as some tensor
refers to it, so no tensor ever points to unmapped memory, and dropping it is not collective. It takes no
room of /dev/shm, which is small in containers, and leaves nothing behind when a job is killed.
"""

import logging
import mmap
import os
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from mpidp.world.collectives import reduced, wait
from mpidp.world.library import mapped_files, read_maps
from mpidp.world.mpi import MPI

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
