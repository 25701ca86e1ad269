"""Steps of a staged plan in, copies on two streams of the device and the waits between them out."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mpidp.reduce.staged_plan import Step


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
