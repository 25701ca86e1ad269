"""The reducer `node`: sums in memory that the ranks of a node share, and slice by slice across nodes.

On a node nothing is sent. Each rank adds its own slice of the segments of all ranks and writes the mean back to all of
them: every byte is read once and written once, which costs as much as a copy.

Across nodes the slice of local rank i is reduced with the slices of the ranks i of the other nodes, on a
communicator of their own, so that all cores and network ports work at once.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from mpidp.reduce.buckets import ALIGNMENT_BYTES, Bucket, BucketLayout, Reducer, plain_buffers
from mpidp.reduce.transport import SIXTEEN_BITS, ReducerOptions, Transport, as_real, pieces
from mpidp.world.rank_memory import SharedWindow
from mpidp.world.world import World

log = logging.getLogger("mpidp")

# A block of the first rank's segment stays in the second-level cache from the addition to the division.
BLOCK_BYTES = 512 << 10
# Below this the two barriers cost more than MPI's own Allreduce takes.
SMALL_BYTES = 128 << 10


class NodeMean:
    """Means in a shared-memory window of the node. Construction is collective.

    Attributes:
        own: this rank's segment, uint8.

    Args:
        world: the ranks.
        options: piece size, comm_dtype, error feedback of what crosses the network.
        num_bytes: size of a segment, the same on every rank.
        block_bytes: bytes that are added at a time.
    """

    def __init__(self, world: World, options: ReducerOptions, num_bytes: int, block_bytes: int = BLOCK_BYTES):
        topology = world.topology
        self._several_nodes = topology.num_nodes > 1
        self._local_rank, self._local_size = topology.node_comm.rank, topology.node_comm.size
        self._num_slices = topology.min_local_size if self._several_nodes else self._local_size
        self._block_bytes = block_bytes
        self._pause_s = options.pause_s
        self._wide = torch.empty(2, block_bytes // torch.float32.itemsize, dtype=torch.float32)
        if self._several_nodes and topology.cross_comm is not None:
            self._across_sums = Transport(topology.cross_comm, options, world.size, across_nodes=True)
            self._across_means = Transport(topology.cross_comm, options, topology.num_nodes, across_nodes=True)
        # The factor from a node's sum to its share of the mean over nodes, whose numbers of ranks may differ.
        self._share = topology.num_nodes / world.size
        self._window = SharedWindow(topology.node_comm, num_bytes)
        self.own = self._window.segments[self._local_rank]

    def mean(self, start: int, numel: int, dtype: torch.dtype) -> None:
        """Replaces `numel` real numbers from byte `start` of every segment by their mean over ranks. Collective."""
        stop = start + numel * dtype.itemsize
        flats = [segment[start:stop].view(dtype) for segment in self._window.segments]
        self._window.synchronize(self._pause_s)  # now the writes of all ranks of the node are visible
        if self._local_rank < self._num_slices:
            first, last = self._slice(numel, dtype.itemsize)
            if first < last:
                self._mean_of_slice([flat[first:last] for flat in flats])
        self._window.synchronize(self._pause_s)  # all slices are written

    def close(self) -> None:
        """Drops the window. Not collective."""
        self._window.free()

    def _slice(self, numel: int, itemsize: int) -> tuple[int, int]:
        """This rank's slice. Slices begin on cache lines, so that no two ranks write to one."""
        line = max(1, ALIGNMENT_BYTES // itemsize)
        edges = [
            min(numel, -(-numel * number // self._num_slices // line) * line) for number in range(self._num_slices + 1)
        ]
        return edges[self._local_rank], edges[self._local_rank + 1]

    def _mean_of_slice(self, parts: list[Tensor]) -> None:
        if not self._several_nodes:
            for block in self._blocks(parts[0]):
                self._add([part[block] for part in parts], divide_by=self._local_size)
                _hand_out([part[block] for part in parts])
            return
        narrow = parts[0].dtype in SIXTEEN_BITS
        for block in self._blocks(parts[0]):
            self._add([part[block] for part in parts], divide_by=1 / self._share if narrow else 1)
        (self._across_means if narrow else self._across_sums).mean(parts[0])
        _hand_out(parts)

    def _add(self, parts: list[Tensor], divide_by: float) -> None:
        """Adds all parts into the first; 16-bit numbers in float32, rounded once."""
        if parts[0].dtype not in SIXTEEN_BITS:
            for part in parts[1:]:
                parts[0].add_(part)
            if divide_by != 1:
                parts[0].div_(divide_by)
            return
        total, term = self._wide[:, : parts[0].numel()]
        total.copy_(parts[0])
        for part in parts[1:]:
            total.add_(term.copy_(part))  # torch would widen into new memory
        parts[0].copy_(total.div_(divide_by))

    def _blocks(self, part: Tensor) -> Iterator[slice]:
        return pieces(part.numel(), max(part.element_size(), torch.float32.itemsize), self._block_bytes)


def _hand_out(parts: list[Tensor]) -> None:
    for part in parts[1:]:
        part.copy_(parts[0])


def make_node_mean(world: World, options: ReducerOptions, num_bytes: int) -> NodeMean | None:
    """A NodeMean on every rank; None on all if some node cannot share memory, which is logged. Collective."""
    made: NodeMean | None = None
    try:
        made = NodeMean(world, options, num_bytes)
    except OSError as error:
        if world.local_rank == 0:
            log.warning(
                "%s: the ranks of this node cannot share memory (%s): gradients go through MPI's Allreduce instead, "
                "which is slower",
                world.host,
                error,
            )
    if world.any(made is None):
        if made is not None:
            made.close()
        return None
    return made


class NodeReducer(Reducer):
    """Keeps the buckets in one window of the node and sums them there. For gradients in host memory."""

    def __init__(self, world: World, options: ReducerOptions):
        super().__init__(world, options)
        self._whole = Transport.of_all(world, options)
        self._calls: dict[Bucket, Callable[[], None]] = {}
        self._shared: NodeMean | None = None
        self._starts: dict[int, int] = {}  # address of a bucket to be summed in shared memory -> its start there

    def allocate(self, layouts: Sequence[BucketLayout], device: torch.device) -> list[Tensor]:
        """One window for all buckets. Collective. Plain memory with one rank a node, or if memory cannot be shared."""
        starts, num_bytes = _place(layouts)
        if self._options.share_memory and self._world.topology.max_local_size > 1 and device.type == "cpu" and layouts:
            self._shared = make_node_mean(self._world, self._options, num_bytes)
        if self._shared is None:
            return plain_buffers(layouts, device)
        flats = [
            self._shared.own[start : start + layout.num_bytes].view(layout.dtype)
            for layout, start in zip(layouts, starts, strict=True)
        ]
        self._starts = {
            flat.data_ptr(): start
            for layout, flat, start in zip(layouts, flats, starts, strict=True)
            if layout.num_bytes > SMALL_BYTES
        }
        return flats

    def close(self) -> None:
        """Drops the window. Not collective."""
        if self._shared is not None:
            self._calls.clear()
            self._shared.close()
            self._shared = None

    def mean(self, bucket: Bucket) -> None:
        """A sum in shared memory between two barriers of the node. Collective."""
        call = self._calls.get(bucket)
        if call is None:
            call = self._calls[bucket] = self._prepare(bucket)
        call()

    def _prepare(self, bucket: Bucket) -> Callable[[], None]:
        start = self._starts.get(bucket.flat.data_ptr())
        if start is None:
            return self._whole.prepare(bucket.flat)
        assert self._shared is not None
        real = as_real(bucket.flat)
        return partial(self._shared.mean, start, real.numel(), real.dtype)


def _place(layouts: Sequence[BucketLayout]) -> tuple[list[int], int]:
    """Where each bucket starts in a segment, on cache lines, and the length of all."""
    starts, end = [], 0
    for layout in layouts:
        starts.append(end)
        end += -(-layout.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return starts, end
