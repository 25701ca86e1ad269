"""A flat tensor in, its mean over ranks out, in place, by MPI's own Allreduce in pieces."""

from torch import Tensor

from mpidp.reduce.pieces import pieces
from mpidp.reduce.streams import synchronize_stream
from mpidp.world.mpi import MPI


class Allreduce:
    """Sum, then division. Collective; allocates nothing.

    Args:
        comm: the communicator.
        piece_bytes: the largest buffer given to one MPI call.
        count: what the sum is divided by.
    """

    def __init__(self, comm: MPI.Intracomm, piece_bytes: int, count: int):
        self.comm = comm
        self.piece_bytes = piece_bytes
        self.count = count

    def mean(self, flat: Tensor) -> None:
        """Replaces a contiguous float32 or float64 tensor (host, or device if MPI takes it) by its mean over ranks."""
        synchronize_stream(flat)
        for piece in pieces(flat.numel(), flat.element_size(), self.piece_bytes):
            part = flat[piece]
            self.comm.Allreduce(MPI.IN_PLACE, part if part.is_cuda else part.numpy(), op=MPI.SUM)
        flat.div_(self.count)
