"""Enters: the processes of a node. Leaves: how many cores each of them has to itself; a warning about too few."""

import os
import warnings

from mpidp.world.mpi import MPI
from mpidp.world.pinning import Pinned, crowded, too_few_cores


def cores_per_rank(node_comm: MPI.Intracomm) -> int:
    """Return this rank's share of its cores, at least 1. Collective on the node.

    Ranks that a launcher pinned to cores of their own have those; ranks that may all run anywhere share.
    """
    cores = os.sched_getaffinity(0)
    sharing = sum(bool(cores & other) for other in node_comm.allgather(cores))
    return max(1, len(cores) // sharing)


def warn_of_cores(comm: MPI.Intracomm, host: str, threads: int, stacklevel: int) -> None:
    """Warn once, on rank 0, when threads of ranks get in each other's way. Collective.

    Args:
        comm: all ranks.
        host: name of this node.
        threads: threads that this rank computes with.
        stacklevel: whose line the warning names, as `warnings.warn` has it for this function's caller.
    """
    ranks = comm.gather(Pinned(host, frozenset(os.sched_getaffinity(0)), threads), root=0)
    if ranks is None:
        return
    for text in (too_few_cores(ranks), crowded(ranks, os.cpu_count() or 1)):
        if text is not None:
            warnings.warn(text, stacklevel=stacklevel)
