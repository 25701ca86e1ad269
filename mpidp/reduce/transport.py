"""The mean of flat tensors over a communicator, by MPI's own Allreduce or the 16-bit exchange."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpidp.reduce.exchange import (
    MAX_PIECE_BYTES,
    SIXTEEN_BITS,
    ErrorFeedback,
    Exchange,
    pieces,
    sent_dtype,
    synchronize_stream,
)
from mpidp.reduce.reducer import PIECE_BYTES, ReducerOptions
from mpidp.world.collectives import wait
from mpidp.world.mpi import MPI
from mpidp.world.world import World

Array = NDArray[np.floating[Any]]

# Pieces under way at once across a network: while one waits for its next hop, another fills the link.
IN_FLIGHT = 4


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
    def of_all(world: World, options: ReducerOptions) -> "Transport":
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
