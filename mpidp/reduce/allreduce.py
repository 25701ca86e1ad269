"""A flat tensor in, its mean over ranks out, in place, by MPI's own Allreduce in pieces."""

from collections import deque

from torch import Tensor

from mpidp.reduce.pieces import pieces
from mpidp.reduce.streams import synchronize_stream
from mpidp.reduce.waiting import wait
from mpidp.world.mpi import MPI

# Pieces under way at once across a network: while one waits for its next hop, another fills the link.
IN_FLIGHT = 4


class Allreduce:
    """Sum, then division. Collective; allocates nothing but requests.

    Args:
        comm: the communicator.
        piece_bytes: the largest buffer given to one MPI call.
        count: what the sum is divided by.
        across_nodes: keep several pieces under way at once, by non-blocking calls (in host memory only: they are not
            safe on device memory).
    """

    def __init__(self, comm: MPI.Intracomm, piece_bytes: int, count: int, across_nodes: bool):
        self.comm = comm
        self.piece_bytes = piece_bytes
        self.count = count
        self.across_nodes = across_nodes

    def mean(self, flat: Tensor) -> None:
        """Replaces a contiguous float32 or float64 tensor (host, or device if MPI takes it) by its mean over ranks."""
        parts = [flat[piece] for piece in pieces(flat.numel(), flat.element_size(), self.piece_bytes)]
        if self.across_nodes and not flat.is_cuda:
            self._sum_in_flight(parts)
        else:
            synchronize_stream(flat)
            for part in parts:
                self.comm.Allreduce(MPI.IN_PLACE, part if part.is_cuda else part.numpy(), op=MPI.SUM)
        flat.div_(self.count)

    def _sum_in_flight(self, parts: list[Tensor]) -> None:
        under_way: deque[MPI.Request] = deque()
        for part in parts:
            if len(under_way) == IN_FLIGHT:
                wait(under_way.popleft())
            under_way.append(self.comm.Iallreduce(MPI.IN_PLACE, part.numpy(), op=MPI.SUM))
        for request in under_way:
            wait(request)
