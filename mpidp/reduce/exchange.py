"""A flat tensor in, its mean over ranks out, in place, with 16 bits travelling and float32 sums.

MPI has no 16-bit floating-point type, and summing in 16 bits along a ring would round at every hop. So each rank
becomes the owner of one part: it receives that part from everybody (Alltoall), adds in float32 in the order of ranks,
divides, rounds once, and everybody collects the results (Allgather). That is as many bytes as a ring moves.

The error of a mean is at most half a unit in the last place of the 16-bit type for each contribution, plus as much
for the result: 2^-8 of the largest contribution for bfloat16 (8 significant bits), 2^-11 for float16 (11). Each
contribution to a float16 wire must fit: beyond 65504 it becomes infinite, as it would in a float16 gradient.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mpidp.reduce.pieces import pieces
from mpidp.reduce.streams import synchronize_stream
from mpidp.world.mpi import MPI


class Exchange:
    """The mean by exchange. Collective; allocates nothing after its first call.

    Args:
        comm: the communicator.
        dtype: torch.float16 or torch.bfloat16, what travels.
        piece_bytes: bytes of one Alltoall; the scratch memory is 2 to 4 times that.
        count: what the sum over all is divided by; more than the size of the communicator when each contribution is
            a sum already.
    """

    def __init__(self, comm: MPI.Intracomm, dtype: torch.dtype, piece_bytes: int, count: int):
        self.comm = comm
        self.dtype = dtype
        # A sum must not overflow 16 bits on its way: send each contribution as a mean, and average the means.
        self._scale = comm.size / count
        self._part = max(1, piece_bytes // dtype.itemsize // comm.size)  # elements of one owner's part
        self._scratch_device: torch.device | None = None

    def mean(self, flat: Tensor) -> None:
        """Replaces a tensor of float32 or of the wire's dtype by its mean over ranks, the same bits on all."""
        self._prepare(flat.device)
        for piece in pieces(flat.numel(), self.dtype.itemsize, self._part * self.comm.size * self.dtype.itemsize):
            self._mean_of_piece(flat[piece])

    def _mean_of_piece(self, values: Tensor) -> None:
        size = self.comm.size
        part = -(-values.numel() // size)
        sent, received = self._sent[: size * part], self._received[: size * part]
        if self._scale != 1:
            values.mul_(self._scale)
        sent[: values.numel()].copy_(values)
        sent[values.numel() :].zero_()
        self._send(self.comm.Alltoall, sent, received)
        total = self._total[:part]
        total.copy_(received[:part])
        for rank in range(1, size):
            total.add_(received[rank * part : (rank + 1) * part])
        total.div_(size)
        own = received[:part]
        own.copy_(total)
        self._send(self.comm.Allgather, own, sent)
        values.copy_(sent[: values.numel()])

    def _send(self, collective: Callable[[object, object], None], source: Tensor, target: Tensor) -> None:
        synchronize_stream(source)
        collective(as_buffer(source), as_buffer(target))

    def _prepare(self, device: torch.device) -> None:
        if self._scratch_device == device:
            return
        self._scratch_device = device
        numel = self._part * self.comm.size
        self._sent = torch.empty(numel, dtype=self.dtype, device=device)
        self._received = torch.empty(numel, dtype=self.dtype, device=device)
        self._total = torch.empty(self._part, dtype=torch.float32, device=device)


def as_buffer(tensor: Tensor) -> object:
    """A 16-bit tensor as MPI takes it: its bits as integers."""
    bits = tensor.view(torch.int16)
    return bits if bits.is_cuda else bits.numpy()
