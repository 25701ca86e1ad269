"""A flat tensor in, its mean over ranks out, in place, by MPI's own Allreduce in pieces."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mpidp.reduce.options import PIECE_BYTES
from mpidp.reduce.pieces import MAX_PIECE_BYTES, pieces
from mpidp.reduce.streams import synchronize_stream
from mpidp.world.mpi import MPI
from mpidp.world.waiting import wait

Array = NDArray[np.floating[Any]]

# Pieces under way at once across a network: while one waits for its next hop, another fills the link.
IN_FLIGHT = 4


class Allreduce:
    """Sum, then division. Allocates nothing but requests once a buffer is prepared.

    Args:
        comm: the communicator.
        piece_bytes: the largest buffer given to one MPI call; 0 for what suits.
        count: what the sum is divided by.
        across_nodes: keep several pieces under way at once, by non-blocking calls (in host memory only: they are not
            safe on device memory).
        pause_s: how long to sleep between two looks at the network.
    """

    def __init__(self, comm: MPI.Intracomm, piece_bytes: int, count: int, across_nodes: bool, pause_s: float):
        self.comm = comm
        self.piece_bytes = piece_bytes
        self.count = count
        self.across_nodes = across_nodes
        self.pause_s = pause_s

    def prepare(self, flat: Tensor) -> Callable[[], None]:
        """What replaces a float32 or float64 tensor (host, or device if MPI takes it) by its mean; collective.

        The tensor is cut and wrapped for MPI here, once, which takes as long as summing a small one does.
        """
        # Pieces help where several are under way. Blocking calls, as on a device, are best few and large.
        suitable = PIECE_BYTES if self.across_nodes and not flat.is_cuda else MAX_PIECE_BYTES
        parts = [flat[p] for p in pieces(flat.numel(), flat.element_size(), self.piece_bytes or suitable)]
        if flat.is_cuda:
            return partial(self._mean_on_device, parts, flat)
        arrays = [part.numpy() for part in parts]
        return partial(self._mean_in_flight if self.across_nodes else self._mean, arrays, flat.numpy())

    def _mean_on_device(self, parts: list[Tensor], flat: Tensor) -> None:
        synchronize_stream(flat)
        for part in parts:
            self.comm.Allreduce(MPI.IN_PLACE, part, MPI.SUM)
        flat.div_(self.count)

    def _mean(self, arrays: list[Array], flat: Array) -> None:
        for array in arrays:
            self.comm.Allreduce(MPI.IN_PLACE, array, MPI.SUM)
        np.divide(flat, self.count, out=flat)  # for a small array in half the time of torch's

    def _mean_in_flight(self, arrays: list[Array], flat: Array) -> None:
        under_way: deque[MPI.Request] = deque()
        for array in arrays:
            if len(under_way) == IN_FLIGHT:
                wait(under_way.popleft(), self.pause_s)
            under_way.append(self.comm.Iallreduce(MPI.IN_PLACE, array, MPI.SUM))
        for request in under_way:
            wait(request, self.pause_s)
        np.divide(flat, self.count, out=flat)
