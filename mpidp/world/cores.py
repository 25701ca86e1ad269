"""Enters: the processes of a node. Leaves: how many cores each of them has to itself, on average."""

import os

from mpidp.world.mpi import MPI


def cores_per_rank(node_comm: MPI.Intracomm) -> int:
    """Return this rank's share of its cores, at least 1. Collective on the node.

    Ranks that a launcher pinned to cores of their own have those; ranks that may all run anywhere share.
    """
    cores = os.sched_getaffinity(0)
    sharing = sum(bool(cores & other) for other in node_comm.allgather(cores))
    return max(1, len(cores) // sharing)
