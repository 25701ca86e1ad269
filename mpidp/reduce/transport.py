"""A communicator and a wire in, the mean of flat tensors of any gradient dtype over it out."""

from typing import Protocol

import torch
from torch import Tensor

from mpidp.reduce.allreduce import Allreduce
from mpidp.reduce.exchange import Exchange
from mpidp.reduce.feedback import ErrorFeedback
from mpidp.reduce.options import PIECE_BYTES, ReducerOptions
from mpidp.reduce.pieces import MAX_PIECE_BYTES
from mpidp.reduce.wire import SIXTEEN_BITS, wire_dtype
from mpidp.world.mpi import MPI
from mpidp.world.world import World


class Transport(Protocol):
    """Replaces a contiguous real tensor by its mean over a communicator, in place. Collective."""

    def mean(self, flat: Tensor) -> None:
        """The same bits on every rank."""


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
        self._feedback: dict[torch.dtype, ErrorFeedback] = {}

    def mean(self, flat: Tensor) -> None:
        """Replaces a contiguous one-dimensional tensor by its mean over the communicator, in place. Collective."""
        real = as_real(flat)
        travels = wire_dtype(real.dtype, self._options.wire)
        if travels not in self._made:
            self._made[travels] = self._make(travels)
        if travels != real.dtype and self._options.error_feedback:
            self._feedback.setdefault(travels, ErrorFeedback(travels)).compensate(real)
        self._made[travels].mean(real)

    def _make(self, travels: torch.dtype) -> Transport:
        asked = self._options.piece_bytes
        if travels in SIXTEEN_BITS:
            return Exchange(self._comm, travels, asked or PIECE_BYTES, self._count, self._across_nodes)
        suitable = PIECE_BYTES if self._across_nodes else MAX_PIECE_BYTES
        return Allreduce(self._comm, asked or suitable, self._count, self._across_nodes)


def transports_of_all(world: World, options: ReducerOptions) -> Transports:
    """Means over all ranks of a world."""
    return Transports(world.topology.comm, options, world.size, world.num_nodes > 1)


def as_real(flat: Tensor) -> Tensor:
    """The same memory as real numbers: MPI sums a complex buffer as twice as many real ones."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
