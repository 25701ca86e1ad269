"""The communicators of reductions: all ranks, the ranks of a node, and across nodes; and the cores of a rank."""

import os
import warnings
from dataclasses import dataclass
from typing import cast

from mpidp.world.collectives import reduced
from mpidp.world.mpi import MPI
from mpidp.world.system import Pinned, crowded, too_few_cores


@dataclass(frozen=True)
class Topology:
    """Communicators of their own, so that a helper thread's reductions never meet the training thread's calls.

    Attributes:
        comm: all ranks.
        node_comm: the ranks of this node.
        cross_comm: the ranks with this rank's local rank, one a node; None on ranks beyond the smallest node.
        min_local_size: the smallest number of ranks on a node, and so how many `cross_comm`s there are.
        max_local_size: the largest number of ranks on a node.
        num_nodes: number of nodes.
        node: number of this node; nodes are numbered by their lowest rank.
    """

    comm: MPI.Intracomm
    node_comm: MPI.Intracomm
    cross_comm: MPI.Intracomm | None
    min_local_size: int
    max_local_size: int
    num_nodes: int
    node: int

    def free(self) -> None:
        """Gives the communicators back. Collective."""
        for comm in (self.cross_comm, self.node_comm, self.comm):
            if comm is not None:
                comm.Free()


def make_topology(comm: MPI.Intracomm) -> Topology:
    """Makes them. Collective."""
    own = comm.Dup()
    node_comm = cast(MPI.Intracomm, own.Split_type(MPI.COMM_TYPE_SHARED))
    min_local_size = reduced(own, node_comm.size, MPI.MIN)
    max_local_size = reduced(own, node_comm.size, MPI.MAX)
    has_peers = node_comm.rank < min_local_size
    cross_comm = cast(MPI.Intracomm, own.Split(node_comm.rank if has_peers else MPI.UNDEFINED, own.rank))
    # The first cross-node communicator has the lowest rank of each node, in order of rank.
    node, num_nodes = node_comm.bcast((cross_comm.rank, cross_comm.size) if node_comm.rank == 0 else None, root=0)
    return Topology(own, node_comm, cross_comm if has_peers else None, min_local_size, max_local_size, num_nodes, node)


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
