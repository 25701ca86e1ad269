"""A communicator in, those that reductions run on out: all ranks, the ranks of a node, and lanes across nodes."""

from dataclasses import dataclass
from typing import cast

from mpidp.world.mpi import MPI
from mpidp.world.scalar import reduced


@dataclass(frozen=True)
class Topology:
    """Communicators of their own, so that a helper thread's reductions never meet the training thread's calls.

    Attributes:
        comm: all ranks.
        node_comm: the ranks of this node.
        lane_comm: the ranks with this rank's local rank, one a node; None on ranks beyond the smallest node.
        num_lanes: how many lanes there are: the smallest number of ranks on a node.
        max_local_size: the largest number of ranks on a node.
        num_nodes: number of nodes.
        node: number of this node; nodes are numbered by their lowest rank.
    """

    comm: MPI.Intracomm
    node_comm: MPI.Intracomm
    lane_comm: MPI.Intracomm | None
    num_lanes: int
    max_local_size: int
    num_nodes: int
    node: int

    def free(self) -> None:
        """Gives the communicators back. Collective."""
        for comm in (self.lane_comm, self.node_comm, self.comm):
            if comm is not None:
                comm.Free()


def make_topology(comm: MPI.Intracomm) -> Topology:
    """Collective."""
    own = comm.Dup()
    node_comm = cast(MPI.Intracomm, own.Split_type(MPI.COMM_TYPE_SHARED))
    num_lanes = reduced(own, node_comm.size, MPI.MIN)
    max_local_size = reduced(own, node_comm.size, MPI.MAX)
    in_lane = node_comm.rank < num_lanes
    lane_comm = cast(MPI.Intracomm, own.Split(node_comm.rank if in_lane else MPI.UNDEFINED, own.rank))
    # The first lane has the lowest rank of each node, in order of rank.
    node, num_nodes = node_comm.bcast((lane_comm.rank, lane_comm.size) if node_comm.rank == 0 else None, root=0)
    return Topology(own, node_comm, lane_comm if in_lane else None, num_lanes, max_local_size, num_nodes, node)
