"""The mean of flat tensors over a communicator, by MPI's own Allreduce or by an exchange of 16-bit numbers.

MPI has no 16-bit floating-point type, and summing in 16 bits along a ring would round at every hop. So in the exchange
each rank owns one part: it receives that part from all ranks (Alltoall), adds in float32 in the order of ranks, divides
and rounds once; then all ranks gather the results (Allgather). A ring would move as many bytes.

A number is rounded to the 16-bit type twice, as a contribution and as the mean, by at most half a unit in the last
place: the error is at most 2^-7 of the largest contribution for bfloat16 (8 significant bits), 2^-10 for float16 (11;
and below 6e-5 its steps stay at 2^-24). A contribution in float16 must fit: beyond 65504 it becomes infinite, as
it would in a float16 gradient.

Error feedback (Seide et al. 2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019): each rank keeps the
difference between its gradient and the rounded one that it sent, and adds it to its next contribution, so that small
gradients are delayed and not lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpidp.world.collectives import wait
from mpidp.world.mpi import MPI
from mpidp.world.world import World

# MPI counts are C ints, and libraries compute byte offsets in them too: stay far below 2^31 of either.
MAX_PIECE_BYTES = 1 << 30


def pieces(numel: int, itemsize: int, piece_bytes: int = MAX_PIECE_BYTES) -> Iterator[slice]:
    """Consecutive slices that cover `range(numel)`, each of at most `piece_bytes` bytes (at least one element)."""
    step = max(1, min(piece_bytes, MAX_PIECE_BYTES) // itemsize)
    for start in range(0, numel, step):
        yield slice(start, min(start + step, numel))


def synchronize_stream(tensor: Tensor) -> None:
    """Waits for the current stream of the tensor's device: MPI must not read before the kernels have written."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


SIXTEEN_BITS = (torch.float16, torch.bfloat16)
COMM_DTYPES = {"full": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def sent_dtype(gradient: torch.dtype, comm_dtype: str) -> torch.dtype:
    """The dtype in which gradients of a (real) dtype are sent. Only float32 is rounded, float64 never."""
    shortened = COMM_DTYPES[comm_dtype]
    return shortened if shortened is not None and gradient == torch.float32 else gradient


class Exchange:
    """The mean by exchange. Once a buffer is prepared it allocates only requests.

    Args:
        comm: the communicator.
        dtype: torch.float16 or torch.bfloat16, in which numbers are sent.
        piece_bytes: bytes of one Alltoall; the scratch memory is about five times that.
        count: what the sum over all is divided by; more than the size of the communicator when each contribution is
            a sum already.
        across_nodes: keep two pieces under way at once, by non-blocking calls (in host memory only).
        pause_s: seconds to sleep between two tests of the messages.
    """

    def __init__(
        self, comm: MPI.Intracomm, dtype: torch.dtype, piece_bytes: int, count: int, across_nodes: bool, pause_s: float
    ):
        self.comm, self.dtype = comm, dtype
        self.across_nodes, self.pause_s = across_nodes, pause_s
        # A sum must not overflow in 16 bits: each contribution is sent as a mean, and the means are averaged.
        self._scale = comm.size / count
        self._part = max(1, piece_bytes // dtype.itemsize // comm.size)  # elements of one owner's part
        self._device: torch.device | None = None

    def prepare(self, flat: Tensor) -> Callable[[], None]:
        """Returns a collective function that replaces a tensor of float32 or that dtype by its mean."""
        self._make_scratch(flat.device)
        parts = [flat[piece] for piece in pieces(flat.numel(), 1, self._part * self.comm.size)]
        return partial(self._mean_in_flight if self.across_nodes and not flat.is_cuda else self._mean, parts)

    def _mean(self, parts: list[Tensor]) -> None:
        for values in parts:
            sent, received = self._fill(values, 0)
            synchronize_stream(sent)
            self.comm.Alltoall(as_buffer(sent), as_buffer(received))
            own = self._add(received)
            synchronize_stream(own)
            self.comm.Allgather(as_buffer(own), as_buffer(sent))
            values.copy_(sent[: values.numel()])

    def _mean_in_flight(self, parts: list[Tensor]) -> None:
        """Gathers the results of one piece while the contributions of the next one are sent."""
        dealing = [self._deal(values, index) for index, values in enumerate(parts[:2])]
        for index, values in enumerate(parts):
            wait(dealing[index], self.pause_s)
            sent, received = self._cut(values.numel(), index % 2)
            own = self._add(received)
            wait(self.comm.Iallgather(as_buffer(own), as_buffer(sent)), self.pause_s)
            values.copy_(sent[: values.numel()])
            if index + 2 < len(parts):
                dealing.append(self._deal(parts[index + 2], index + 2))

    def _deal(self, values: Tensor, index: int) -> MPI.Request:
        sent, received = self._fill(values, index % 2)
        return self.comm.Ialltoall(as_buffer(sent), as_buffer(received))

    def _fill(self, values: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Rounds the contributions into the send buffer, with zeros after them up to a full part for each rank."""
        sent, received = self._cut(values.numel(), number)
        if self._scale != 1:
            values.mul_(self._scale)
        sent[: values.numel()].copy_(values)
        sent[values.numel() :].zero_()
        return sent, received

    def _cut(self, numel: int, number: int) -> tuple[Tensor, Tensor]:
        used = -(-numel // self.comm.size) * self.comm.size
        return self._sent[number, :used], self._received[number, :used]

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
        # For each of two pieces under way a part for each rank.
        numel = self._part * self.comm.size
        self._sent, self._received = (torch.empty(2, numel, dtype=self.dtype, device=device) for _ in range(2))
        self._wide = torch.empty(2, self._part, dtype=torch.float32, device=device)


def as_buffer(tensor: Tensor) -> object:
    """A 16-bit tensor as MPI takes it: its bits as integers."""
    bits = tensor.view(torch.int16)
    return bits if bits.is_cuda else bits.numpy()


class ErrorFeedback:
    """The rounding errors of one buffer on this rank.

    Attributes:
        error: the errors to be added next time, real numbers like the buffer's.

    Args:
        flat: the buffer.
        dtype: the 16-bit dtype in which it is sent.
        scale: what the buffer is multiplied by before it is rounded.
    """

    def __init__(self, flat: Tensor, dtype: torch.dtype, scale: float):
        self._flat = flat
        self._scale = scale
        self._rounded = torch.empty_like(flat, dtype=dtype)
        self.error = torch.zeros_like(flat)

    def compensate(self) -> None:
        """Adds the last error to the buffer, in place, and stores the error that rounding it now will make."""
        self._flat.add_(self.error)
        torch.mul(self._flat, self._scale, out=self.error)
        self.error.copy_(self._rounded.copy_(self.error)).div_(self._scale)
        torch.sub(self._flat, self.error, out=self.error)
        # Where it overflowed the error is dropped: an infinite one would be added for ever.
        self.error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


class Residuals:
    """The rounding errors of all buffers of a model on this rank, so that a checkpoint can hold them.

    Buffers come in the order of their first reduction, which is the same in every run of the same layout.
    """

    def __init__(self) -> None:
        self._feedbacks: list[ErrorFeedback] = []
        self._waiting: list[Tensor] = []  # loaded, for buffers that are not registered yet

    def add(self, feedback: ErrorFeedback) -> None:
        """Registers the next buffer, and gives it the errors loaded for it."""
        self._feedbacks.append(feedback)
        if self._waiting:
            feedback.error.copy_(self._waiting.pop(0))

    def tensors(self) -> list[Tensor]:
        """The errors themselves, not copies."""
        return [feedback.error for feedback in self._feedbacks] + self._waiting

    def load(self, errors: Sequence[Tensor]) -> None:
        """Loads errors that `tensors` returned in a run of the same layout; to be called before the first reduction."""
        assert not self._feedbacks
        self._waiting = list(errors)


Array = NDArray[np.floating[Any]]

# Pieces under way at once across a network: while one waits for its next hop, another fills the link.
IN_FLIGHT = 4


# Across a network: with a library that sends a large buffer in one message every hop waits for all of it, while pieces
# of a mebibyte keep all links busy at once.
PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class ReducerOptions:
    """Options that every reducer understands, as far as they concern it.

    Attributes:
        piece_bytes: the largest buffer given to one call of MPI; 0 for 1 MiB across a network and no limit on one node,
            where pieces would only cost calls.
        comm_dtype: "full", or "bf16" or "fp16": float32 gradients are sent in 16 bits.
        error_feedback: add the error of rounding to 16 bits to the next step's gradient; takes 1.5 times the memory of
            the gradients.
        residuals: the rounding errors of all buffers, for checkpoints; not an option.
        share_memory: let ranks of a node sum in shared memory, which is not possible when ranks may die.
        pause_s: seconds that a thread which waits for the network may sleep between two tests; 0 never sleeps.
    """

    piece_bytes: int = 0
    comm_dtype: str = "full"
    error_feedback: bool = False
    pause_s: float = 0.0
    share_memory: bool = field(default=True, repr=False)
    residuals: Residuals | None = field(default=None, repr=False, compare=False)


class Transport:
    """The mean over a communicator, by MPI's own Allreduce, or for 16 bits by the exchange.

    Args:
        comm: the communicator.
        options: piece size, comm_dtype, error feedback.
        count: of how many contributions each tensor given to `mean` holds a partial sum, over the whole communicator;
            its size, unless the ranks of a node were added before.
        across_nodes: whether the communicator crosses a network. Then several pieces are kept under way at once, by
            non-blocking calls (in host memory only: they are not safe on device memory).
    """

    def __init__(self, comm: MPI.Intracomm, options: ReducerOptions, count: int, across_nodes: bool):
        self._comm, self._options, self._count, self._across_nodes = comm, options, count, across_nodes
        self._exchanges: dict[torch.dtype, Exchange] = {}
        self._prepared: dict[tuple[int, int, torch.dtype], Callable[[], None]] = {}

    @staticmethod
    def of_all(world: World, options: ReducerOptions) -> Transport:
        """Means over all ranks of a world."""
        return Transport(world.topology.comm, options, world.size, world.num_nodes > 1)

    def mean(self, flat: Tensor) -> None:
        """Replaces a contiguous one-dimensional tensor by its mean over the communicator, in place. Collective.

        The tensor is expected to come again: what can be prepared is kept, and so is its memory.
        """
        key = (flat.data_ptr(), flat.numel(), flat.dtype)
        call = self._prepared.get(key)
        if call is None:
            call = self._prepared[key] = self.prepare(flat)
        call()

    def prepare(self, flat: Tensor) -> Callable[[], None]:
        """Returns a function that does so. Not collective; calling it is, and allocates only requests."""
        real = as_real(flat)
        travels = sent_dtype(real.dtype, self._options.comm_dtype)
        if travels not in SIXTEEN_BITS:
            return self._prepare_allreduce(real)
        if travels not in self._exchanges:
            piece_bytes, pause_s = self._options.piece_bytes or PIECE_BYTES, self._options.pause_s
            exchange = Exchange(self._comm, travels, piece_bytes, self._count, self._across_nodes, pause_s)
            self._exchanges[travels] = exchange
        call = self._exchanges[travels].prepare(real)
        if travels == real.dtype or not self._options.error_feedback:
            return call
        feedback = ErrorFeedback(real, travels, self._comm.size / self._count)
        if self._options.residuals is not None:
            self._options.residuals.add(feedback)

        def compensate_and_call() -> None:
            feedback.compensate()
            call()

        return compensate_and_call

    def _prepare_allreduce(self, flat: Tensor) -> Callable[[], None]:
        """Cuts and wraps the tensor for MPI once, which takes as long as summing a small one."""
        # Pieces help where several are under way. Blocking calls, as on a device, are best few and large.
        suitable = PIECE_BYTES if self._across_nodes and not flat.is_cuda else MAX_PIECE_BYTES
        piece_bytes = self._options.piece_bytes or suitable
        parts = [flat[piece] for piece in pieces(flat.numel(), flat.element_size(), piece_bytes)]
        if flat.is_cuda:
            return partial(self._mean_on_device, parts, flat)
        arrays = [part.numpy() for part in parts]
        return partial(self._mean_in_flight if self._across_nodes else self._mean, arrays, flat.numpy())

    def _mean_on_device(self, parts: list[Tensor], flat: Tensor) -> None:
        synchronize_stream(flat)
        for part in parts:
            self._comm.Allreduce(MPI.IN_PLACE, part, MPI.SUM)
        flat.div_(self._count)

    def _mean(self, arrays: list[Array], flat: Array) -> None:
        for array in arrays:
            self._comm.Allreduce(MPI.IN_PLACE, array, MPI.SUM)
        np.divide(flat, self._count, out=flat)  # for a small array in half the time of torch's

    def _mean_in_flight(self, arrays: list[Array], flat: Array) -> None:
        under_way: deque[MPI.Request] = deque()
        for array in arrays:
            if len(under_way) == IN_FLIGHT:
                wait(under_way.popleft(), self._options.pause_s)
            under_way.append(self._comm.Iallreduce(MPI.IN_PLACE, array, MPI.SUM))
        for request in under_way:
            wait(request, self._options.pause_s)
        np.divide(flat, self._count, out=flat)


def as_real(flat: Tensor) -> Tensor:
    """The same memory as real numbers: MPI sums a complex buffer as twice as many real ones."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
