"""A bucket in, its mean out, by way of memory that all ranks of a node share; across nodes, by lanes."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from mpidp.reduce.buckets import Bucket
from mpidp.reduce.buffers import plain_buffers, torch_dtype
from mpidp.reduce.layout import ALIGNMENT_BYTES, BucketLayout
from mpidp.reduce.node_mean import NodeMean, make_node_mean
from mpidp.reduce.options import ReducerOptions
from mpidp.reduce.transport import as_real, transports_of_all
from mpidp.world.world import World

# Below this the two barriers cost more than MPI's own Allreduce takes.
SMALL_BYTES = 128 << 10


class NodeReducer:
    """Keeps the buckets in one window of the node and sums them there. For gradients in host memory."""

    def __init__(self, world: World, options: ReducerOptions):
        self._world = world
        self._options = options
        self._whole = transports_of_all(world, options)
        self._calls: dict[Bucket, Callable[[], None]] = {}
        self._shared: NodeMean | None = None
        self._starts: dict[int, int] = {}  # address of a bucket to be summed in shared memory -> its start there

    def allocate(self, layouts: Sequence[BucketLayout], device: torch.device) -> list[Tensor]:
        """One window for all buckets. Collective. Plain memory where there is nobody to share it with, or no room."""
        if (
            not self._options.share_memory
            or self._world.topology.max_local_size == 1
            or device.type != "cpu"
            or not layouts
        ):
            return plain_buffers(layouts, device)
        starts, num_bytes = _place(layouts)
        self._shared = make_node_mean(self._world, self._options, num_bytes)
        if self._shared is None:
            return plain_buffers(layouts, device)
        flats = [
            self._shared.own[start : start + layout.num_bytes].view(torch_dtype(layout))
            for layout, start in zip(layouts, starts, strict=True)
        ]
        self._starts = {
            flat.data_ptr(): start
            for layout, flat, start in zip(layouts, flats, starts, strict=True)
            if layout.num_bytes > SMALL_BYTES
        }
        return flats

    def close(self) -> None:
        """Lets go of the window. Not collective."""
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
