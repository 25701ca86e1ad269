"""A flat tensor in, its mean over ranks out, in place, with 16 bits travelling and float32 sums.

MPI has no 16-bit floating-point type, and summing in 16 bits along a ring would round at every hop. So each rank
becomes the owner of one part: it receives that part from everybody (Alltoall), adds in float32 in the order of ranks,
divides, rounds once, and everybody collects the results (Allgather). That is as many bytes as a ring moves.

A number is rounded to the 16-bit type twice, as a contribution and as the mean, by at most half a unit in the last
place: the error is at most 2^-7 of the largest contribution for bfloat16 (8 significant bits), 2^-10 for float16 (11;
and below 6e-5 its steps stay at 2^-24). A contribution to a float16 wire must fit: beyond 65504 it becomes infinite, as
it would in a float16 gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mpidp.reduce.pieces import pieces
from mpidp.reduce.streams import synchronize_stream
from mpidp.world.mpi import MPI
from mpidp.world.waiting import wait


@dataclass(frozen=True)
class _Scratch:
    """Buffers of one piece: a part for each rank, twice, in the wire's dtype."""

    sent: Tensor
    received: Tensor


class Exchange:
    """The mean by exchange. Allocates nothing but requests once a buffer is prepared.

    Args:
        comm: the communicator.
        dtype: torch.float16 or torch.bfloat16, what travels.
        piece_bytes: bytes of one Alltoall; the scratch memory is about five times that.
        count: what the sum over all is divided by; more than the size of the communicator when each contribution is
            a sum already.
        across_nodes: keep two pieces under way at once, by non-blocking calls (in host memory only).
        pause_s: how long to sleep between two looks at the network.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        dtype: torch.dtype,
        piece_bytes: int,
        count: int,
        across_nodes: bool,
        pause_s: float,
    ):
        self.comm = comm
        self.dtype = dtype
        self.across_nodes = across_nodes
        self.pause_s = pause_s
        # A sum must not overflow 16 bits on its way: send each contribution as a mean, and average the means.
        self._scale = comm.size / count
        self._part = max(1, piece_bytes // dtype.itemsize // comm.size)  # elements of one owner's part
        self._device: torch.device | None = None

    def prepare(self, flat: Tensor) -> Callable[[], None]:
        """What replaces a tensor of float32 or of the wire's dtype by its mean, the same bits on all; collective."""
        self._make_scratch(flat.device)
        parts = [flat[piece] for piece in pieces(flat.numel(), 1, self._part * self.comm.size)]
        return partial(self._mean_in_flight if self.across_nodes and not flat.is_cuda else self._mean, parts)

    def _mean(self, parts: list[Tensor]) -> None:
        for values in parts:
            sent, received = self._fill(values, self._scratch[0])
            synchronize_stream(sent)
            self.comm.Alltoall(as_buffer(sent), as_buffer(received))
            own = self._add(received)
            synchronize_stream(own)
            self.comm.Allgather(as_buffer(own), as_buffer(sent))
            values.copy_(sent[: values.numel()])

    def _mean_in_flight(self, parts: list[Tensor]) -> None:
        """While the results of one piece are collected, the contributions of the next one travel."""
        dealing = [self._deal(values, index) for index, values in enumerate(parts[:2])]
        for index, values in enumerate(parts):
            wait(dealing[index], self.pause_s)
            sent, received = self._cut(values.numel(), self._scratch[index % 2])
            own = self._add(received)
            wait(self.comm.Iallgather(as_buffer(own), as_buffer(sent)), self.pause_s)
            values.copy_(sent[: values.numel()])
            if index + 2 < len(parts):
                dealing.append(self._deal(parts[index + 2], index + 2))

    def _deal(self, values: Tensor, index: int) -> MPI.Request:
        sent, received = self._fill(values, self._scratch[index % 2])
        return self.comm.Ialltoall(as_buffer(sent), as_buffer(received))

    def _fill(self, values: Tensor, scratch: _Scratch) -> tuple[Tensor, Tensor]:
        """Rounds the contributions into the send buffer, with zeros after them up to a full part for each rank."""
        sent, received = self._cut(values.numel(), scratch)
        if self._scale != 1:
            values.mul_(self._scale)
        sent[: values.numel()].copy_(values)
        sent[values.numel() :].zero_()
        return sent, received

    def _cut(self, numel: int, scratch: _Scratch) -> tuple[Tensor, Tensor]:
        used = -(-numel // self.comm.size) * self.comm.size
        return scratch.sent[:used], scratch.received[:used]

    def _add(self, received: Tensor) -> Tensor:
        """The mean of this rank's part of all contributions, rounded, in the first part of the buffer."""
        part = received.numel() // self.comm.size
        total, term = self._wide[0, :part], self._wide[1, :part]
        total.copy_(received[:part])
        for rank in range(1, self.comm.size):
            total.add_(term.copy_(received[rank * part : (rank + 1) * part]))  # torch would widen into new memory
        total.div_(self.comm.size)
        return received[:part].copy_(total)

    def _make_scratch(self, device: torch.device) -> None:
        if self._device == device:
            return
        self._device = device
        numel = self._part * self.comm.size
        sent, received = (torch.empty(2, numel, dtype=self.dtype, device=device) for _ in range(2))
        self._scratch = [_Scratch(sent[index], received[index]) for index in range(2)]
        self._wide = torch.empty(2, self._part, dtype=torch.float32, device=device)


def as_buffer(tensor: Tensor) -> object:
    """A 16-bit tensor as MPI takes it: its bits as integers."""
    bits = tensor.view(torch.int16)
    return bits if bits.is_cuda else bits.numpy()
