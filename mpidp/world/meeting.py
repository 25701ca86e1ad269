"""Started processes enter; rank 0 leaves with what each of them knows. For tools that must not wait for torch.

Training uses `mpidp.world.start`, which checks devices too. Here MPI is started with nothing else.
"""

import socket
import time
from typing import TypeVar, cast

from mpidp.world.clock import answer, ask
from mpidp.world.exit import AbortGuard
from mpidp.world.mpi import MPI

T = TypeVar("T")


class Meeting:
    """All ranks of the job. Construction starts MPI and is collective.

    Attributes:
        rank, size: this process among all.
        node: number of this rank's node, numbered by their lowest rank.
        num_nodes: number of nodes.
    """

    def __init__(self) -> None:
        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        self._comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self._comm.rank, self._comm.size
        if self.size > 1:
            AbortGuard(self.rank, self.size, socket.gethostname()).install()
        node_comm = cast(MPI.Intracomm, self._comm.Split_type(MPI.COMM_TYPE_SHARED))
        leader = node_comm.bcast(self.rank, root=0)
        self._leaders = sorted(set(self._comm.allgather(leader)))
        self.node, self.num_nodes = self._leaders.index(leader), len(self._leaders)
        node_comm.Free()

    def gather(self, mine: T) -> list[T] | None:
        """What every rank gives, on rank 0; None on the others. Collective."""
        return self._comm.gather(mine, root=0)

    def broadcast(self, value: T | None) -> T:
        """Rank 0's value, on every rank. Collective."""
        return cast(T, self._comm.bcast(value, root=0))

    def clock_offsets(self) -> list[float]:
        """Seconds by which each node's clock is ahead of node 0's, by node; [] on other ranks than 0. Collective.

        These are the clocks that files and logs are dated by.
        """
        offsets: list[float] = []
        for leader in self._leaders:
            if self.rank == 0:
                offsets.append(0.0 if leader == 0 else ask(self._comm, leader, time.time_ns).offset_ns / 1e9)
            elif self.rank == leader:
                answer(self._comm, 0, time.time_ns)
        return offsets

    def leave(self) -> None:
        """Waits for all ranks and gives the communicator back; MPI ends with the process. Collective."""
        self._comm.Barrier()
        self._comm.Free()
