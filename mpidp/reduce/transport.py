"""A communicator and a wire in, the mean of flat tensors of any gradient dtype over it out."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from mpidp.reduce.allreduce import Allreduce
from mpidp.reduce.exchange import Exchange
from mpidp.reduce.feedback import ErrorFeedback
from mpidp.reduce.options import PIECE_BYTES, ReducerOptions
from mpidp.reduce.wire import SIXTEEN_BITS, wire_dtype
from mpidp.world.mpi import MPI
from mpidp.world.world import World


class Transport(Protocol):
    """A way to the mean over a communicator."""

    def prepare(self, flat: Tensor) -> Callable[[], None]:
        """What replaces a contiguous real tensor by its mean, in place, the same bits on every rank; collective."""


class Transports:
    """The transport that suits each dtype, made when first needed.

    Args:
        comm: the communicator.
        options: piece size, wire, error feedback.
        count: of how many contributions each tensor given to `mean` holds a partial sum, over the whole communicator;
            its size, unless the ranks of a node were added before.
        across_nodes: whether the communicator crosses a network.
    """

    def __init__(self, comm: MPI.Intracomm, options: ReducerOptions, count: int, across_nodes: bool):
        self._comm = comm
        self._across_nodes = across_nodes
        self._count = count
        self._options = options
        self._made: dict[torch.dtype, Transport] = {}
        self._prepared: dict[tuple[int, int, torch.dtype], Callable[[], None]] = {}

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
        """What does so, for whoever keeps it. Not collective; calling it is."""
        real = as_real(flat)
        travels = wire_dtype(real.dtype, self._options.wire)
        if travels not in self._made:
            self._made[travels] = self._make(travels)
        call = self._made[travels].prepare(real)
        if travels == real.dtype or not self._options.error_feedback:
            return call
        feedback = ErrorFeedback(real, travels, self._comm.size / self._count)
        if self._options.residuals is not None:
            self._options.residuals.add(feedback)

        def compensate_and_call() -> None:
            feedback.compensate()
            call()

        return compensate_and_call

    def _make(self, travels: torch.dtype) -> Transport:
        asked, pause_s = self._options.piece_bytes, self._options.pause_s
        if travels in SIXTEEN_BITS:
            return Exchange(self._comm, travels, asked or PIECE_BYTES, self._count, self._across_nodes, pause_s)
        return Allreduce(self._comm, asked, self._count, self._across_nodes, pause_s)


def transports_of_all(world: World, options: ReducerOptions) -> Transports:
    """Means over all ranks of a world."""
    return Transports(world.topology.comm, options, world.size, world.num_nodes > 1)


def as_real(flat: Tensor) -> Tensor:
    """The same memory as real numbers: MPI sums a complex buffer as twice as many real ones."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
