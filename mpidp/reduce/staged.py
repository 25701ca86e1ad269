"""The reducer `staged`: through two host buffers, for device memory that MPI must not be given.

Three things run at once: copies of pieces to the host, their reduction there, and copies back to the device. Two host
buffers suffice: while one is being reduced, the other is first copied to the device and then filled again. The order of
all this is `staged_plan`, which can be tested without a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mpidp.reduce.buckets import Bucket, Reducer
from mpidp.reduce.node import NodeMean, make_node_mean
from mpidp.reduce.transport import ReducerOptions, Transport, as_real, pieces, sent_dtype
from mpidp.world.world import World

# Large enough for the full bandwidth of the bus and of shared memory, small enough that the first piece is down, and
# the reduction can begin, soon.
STAGE_BYTES = 4 << 20


@dataclass(frozen=True)
class Step:
    """One action on one piece.

    Attributes:
        action: "down" (device to host, on the down stream), "reduce" (on the host, blocking), "up" (host to device, on
            the up stream).
        piece: which piece.
        buffer: which host buffer, 0 or 1.
        after: the step whose end this one waits for, as (action, piece); None for no wait.
    """

    action: Literal["down", "reduce", "up"]
    piece: int
    buffer: int
    after: tuple[str, int] | None


def staged_plan(num_pieces: int) -> list[Step]:
    """The steps in the order in which the host issues them.

    "down" of piece k waits for "up" of piece k - 2, which had the same buffer; "reduce" waits for its "down". "up"
    needs no wait: the host issues it when its reduction has returned.
    """
    steps: list[Step] = []
    for piece in range(num_pieces + 1):
        if piece < num_pieces:
            steps.append(Step("down", piece, piece % 2, ("up", piece - 2) if piece >= 2 else None))
        if piece > 0:
            steps.append(Step("reduce", piece - 1, (piece - 1) % 2, ("down", piece - 1)))
            steps.append(Step("up", piece - 1, (piece - 1) % 2, None))
    return steps


class CopyStreams:
    """A stream for copies down and one for copies up. On a CPU the copies happen at once and there is no wait.

    Args:
        device: where the gradients are.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._events: dict[tuple[str, int], torch.cuda.Event] = {}
        if self._on_gpu:
            self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def working(self) -> Iterator[None]:
        """The copies of one bucket: they begin after what the current stream has queued, and it goes on after them."""
        self._events.clear()
        if self._on_gpu:
            self._down.wait_stream(torch.cuda.current_stream(self._device))
        yield
        if self._on_gpu:
            torch.cuda.current_stream(self._device).wait_stream(self._up)

    def down(self, step: Step, host: Tensor, part: Tensor) -> None:
        """Queues a copy to the host; it waits for the step that `step.after` names."""
        if not self._on_gpu:
            host.copy_(part)
            return
        with torch.cuda.stream(self._down):
            if step.after is not None:
                self._down.wait_event(self._events[step.after])
            # Shortened on the device, if the dtypes differ, so that the copy itself is one of bytes.
            host.copy_(part.to(host.dtype), non_blocking=True)
            self._record(step, self._down)

    def up(self, step: Step, part: Tensor, host: Tensor) -> None:
        """Queues a copy to the device."""
        if not self._on_gpu:
            part.copy_(host)
            return
        with torch.cuda.stream(self._up):
            part.copy_(host, non_blocking=True)
            self._record(step, self._up)

    def wait_on_host(self, step: Step) -> None:
        """Blocks this thread until the step that `step.after` names is done on the device."""
        if self._on_gpu and step.after is not None:
            self._events[step.after].synchronize()

    def _record(self, step: Step, stream: torch.cuda.Stream) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        self._events[step.action, step.piece] = event


class StagedReducer(Reducer):
    """Copies pieces of the bucket to the host, reduces them there and copies the means back, all three at once.

    With several ranks a node the host buffers lie in node-shared memory and are summed there. With 16-bit communication
    the device shortens the numbers, so that the bus carries half, too.

    Construction is collective.
    """

    def __init__(self, world: World, options: ReducerOptions, stage_bytes: int = STAGE_BYTES):
        super().__init__(world, options)
        self._stage_bytes = stage_bytes
        self._transport = Transport.of_all(world, options)
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
        """Drops the window. Not collective."""
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
        travels = sent_dtype(flat.dtype, self._options.comm_dtype)
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
            self._transport.mean(host)
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
