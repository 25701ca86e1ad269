"""Enters: tensors in host memory that will be used again. Leaves: tensors on the device."""

from collections import deque

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


class DeviceCopier:
    """Copies batches to a device. What a copy reads from is held until it has finished, and then given up."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in_flight: deque[tuple[torch.cuda.Event, Tensors]] = deque()

    def __call__(self, tensors: Tensors) -> Tensors:
        """Return the tensors on the device; on a GPU the copy goes on, in the current stream, after the return."""
        if self._device.type != "cuda":
            return tensors
        self._give_up_finished()
        stream = torch.cuda.current_stream(self._device)
        copies = {name: tensor.to(self._device, non_blocking=True) for name, tensor in tensors.items()}
        self._in_flight.append((stream.record_event(), tensors))
        return copies

    def _give_up_finished(self) -> None:
        # Copies of one stream finish in order, so the first that has not ends the search.
        while self._in_flight and self._in_flight[0][0].query():  # type: ignore[no-untyped-call]
            self._in_flight.popleft()
