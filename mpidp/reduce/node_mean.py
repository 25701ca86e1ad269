"""A stretch of node-shared memory in, its mean over all ranks out, in place, in every rank's segment.

On a node nothing is sent. Each rank adds its own slice straight out of the segments of all ranks and writes the mean
back to all of them: every byte is read once and written once, which is what copying costs.

Across nodes the slice of local rank i is reduced with the slices of the ranks i of the other nodes, on a
communicator of their own, so that all cores and network ports work at once.
"""

import torch
from torch import Tensor

from mpidp.reduce.layout import ALIGNMENT_BYTES
from mpidp.reduce.options import ReducerOptions
from mpidp.reduce.pieces import pieces
from mpidp.reduce.transport import Transports
from mpidp.reduce.wire import SIXTEEN_BITS
from mpidp.world.window import SharedWindow
from mpidp.world.world import World

# A block of the first rank's segment stays in the second-level cache from the addition to the division.
BLOCK_BYTES = 512 << 10


class NodeMean:
    """A window of the node and the sums in it. Construction is collective.

    Attributes:
        own: this rank's segment, uint8.

    Args:
        world: the ranks.
        options: piece size, wire, error feedback of what crosses the network.
        num_bytes: size of a segment, the same on every rank.
        block_bytes: how much is added at a time.
    """

    def __init__(self, world: World, options: ReducerOptions, num_bytes: int, block_bytes: int = BLOCK_BYTES):
        topology = world.topology
        self._several_nodes = topology.num_nodes > 1
        self._local_rank, self._local_size = topology.node_comm.rank, topology.node_comm.size
        self._num_lanes = topology.num_lanes if self._several_nodes else self._local_size
        self._lane = Transports(topology.lane_comm, options, world.size) if topology.lane_comm else None
        self._stride_bytes = options.piece_bytes if self._several_nodes else block_bytes
        self._total = torch.empty(max(1, self._stride_bytes // torch.float32.itemsize), dtype=torch.float32)
        self._window = SharedWindow(topology.node_comm, num_bytes)
        self.own = self._window.segments[self._local_rank]

    def mean(self, start: int, numel: int, dtype: torch.dtype) -> None:
        """Replaces `numel` real numbers from byte `start` of every segment by their mean over ranks. Collective."""
        stop = start + numel * dtype.itemsize
        flats = [segment[start:stop].view(dtype) for segment in self._window.segments]
        self._window.synchronize()  # what all ranks of the node wrote is there
        if self._local_rank < self._num_lanes:
            for stride in self._strides(numel, dtype.itemsize):
                self._mean_of_stride([flat[stride] for flat in flats])
        self._window.synchronize()  # all slices are written

    def _strides(self, numel: int, itemsize: int) -> list[slice]:
        """This rank's slice, in strides. Slices begin on cache lines, so that no two ranks write to one."""
        line = max(1, ALIGNMENT_BYTES // itemsize)
        edges = [min(numel, -(-numel * lane // self._num_lanes // line) * line) for lane in range(self._num_lanes + 1)]
        first, last = edges[self._local_rank], edges[self._local_rank + 1]
        width = max(itemsize, torch.float32.itemsize)  # 16-bit numbers widen in self._total
        return [slice(first + p.start, first + p.stop) for p in pieces(last - first, width, self._stride_bytes)]

    def _mean_of_stride(self, parts: list[Tensor]) -> None:
        narrow = parts[0].dtype in SIXTEEN_BITS  # added in float32, rounded once
        total = self._total[: parts[0].numel()] if narrow else parts[0]
        if narrow:
            total.copy_(parts[0])
        for part in parts[1:]:
            total.add_(part)
        if self._several_nodes:
            assert self._lane is not None
            self._lane.mean(total)
        else:
            total.div_(self._local_size)
        for part in parts if narrow else parts[1:]:
            part.copy_(total)
