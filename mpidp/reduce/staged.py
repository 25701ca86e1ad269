"""A bucket in, its mean out, by way of two host buffers: for device memory that MPI must not be given."""

import torch
from torch import Tensor

from mpidp.reduce.buckets import Bucket
from mpidp.reduce.buffers import plain_buffers
from mpidp.reduce.copy_streams import CopyStreams
from mpidp.reduce.node_mean import NodeMean, make_node_mean
from mpidp.reduce.options import ReducerOptions
from mpidp.reduce.pieces import pieces
from mpidp.reduce.staged_plan import staged_plan
from mpidp.reduce.transport import as_real, transports_of_all
from mpidp.reduce.wire import wire_dtype
from mpidp.world.world import World

# Large enough for the full bandwidth of the bus and of shared memory, small enough that the first piece is down, and
# the reduction can begin, soon.
STAGE_BYTES = 4 << 20


class StagedReducer:
    """Copies pieces of the bucket to the host, reduces them there and copies the means back, all three at once.

    With several ranks a node the host buffers lie in node-shared memory and are summed there. With a 16-bit wire the
    device shortens the numbers, so that the bus carries half, too.

    Construction is collective.
    """

    allocate = staticmethod(plain_buffers)

    def __init__(self, world: World, options: ReducerOptions, stage_bytes: int = STAGE_BYTES):
        self._options = options
        self._stage_bytes = stage_bytes
        self._transports = transports_of_all(world, options)
        self._shared: NodeMean | None = None
        self._on_gpu = on_gpu = world.device.type == "cuda"
        if options.share_memory and world.topology.max_local_size > 1:
            self._shared = make_node_mean(world, options, 2 * stage_bytes)
        if self._shared is not None:
            self._host = self._shared.own
            if on_gpu:
                pin(self._host)
        else:
            self._host = torch.empty(2 * stage_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._streams = CopyStreams(world.device)

    def close(self) -> None:
        """Lets go of the window. Not collective."""
        if self._shared is None:
            return
        if self._on_gpu:
            torch.cuda.synchronize()  # copies up may still be under way
            unpin(self._host)
        del self._host
        self._shared.close()
        self._shared = None

    def mean(self, bucket: Bucket) -> None:
        """Down, reduce, up, piece by piece, in the order of `staged_plan`. Collective."""
        flat = as_real(bucket.flat)
        travels = wire_dtype(flat.dtype, self._options.wire)
        parts = [flat[piece] for piece in pieces(flat.numel(), travels.itemsize, self._stage_bytes)]
        with self._streams.working():
            for step in staged_plan(len(parts)):
                part = parts[step.piece]
                host = self._buffer(step.buffer, part.numel(), travels)
                if step.action == "down":
                    self._streams.down(step, host, part)
                elif step.action == "up":
                    self._streams.up(step, part, host)
                else:
                    self._streams.wait_on_host(step)
                    self._reduce(step.buffer, host)

    def _reduce(self, buffer: int, host: Tensor) -> None:
        if self._shared is None:
            self._transports.mean(host)
        else:
            self._shared.mean(buffer * self._stage_bytes, host.numel(), host.dtype)

    def _buffer(self, buffer: int, numel: int, dtype: torch.dtype) -> Tensor:
        start = buffer * self._stage_bytes
        return self._host[start : start + numel * dtype.itemsize].view(dtype)


def pin(memory: Tensor) -> None:
    """Tells the driver that this host memory stays where it is, so that copies to and from it need no detour."""
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)  # type: ignore[no-untyped-call]
    if int(status) != 0:
        raise RuntimeError(f"cudaHostRegister of {memory.numel():,} bytes of shared memory failed with {status}")


def unpin(memory: Tensor) -> None:
    """Undoes `pin`, before the memory goes."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
