"""A state in, a copy of it in host memory out, in buffers that the next copy uses again.

Only this copy holds up training. The first one also has to get its memory from the system, which takes longer than the
copy itself.
"""

import copy
from typing import Any

import torch
from torch import Tensor

_Place = tuple[str | int, ...]


class Snapshot:
    """The buffers. What `take` returned is overwritten by the next `take`."""

    def __init__(self) -> None:
        self._buffers: dict[_Place, Tensor] = {}
        self._used: dict[_Place, Tensor] = {}
        self._seen: dict[tuple[Any, ...], Tensor] = {}
        self._waits = False  # whether copies from a GPU may still be under way

    def take(self, state: Any) -> Any:
        """The same nested dicts, lists and tuples, with copies of all tensors, which may be on any device.

        Tensors that are one and the same memory, such as tied weights, stay so. Returns when the copy is complete.
        """
        self._used, self._seen, self._waits = {}, {}, False
        with torch.no_grad():
            result = self._copy(state, ())
        if self._waits:
            torch.cuda.synchronize()
        self._buffers, self._seen = self._used, {}
        return result

    def _copy(self, value: Any, place: _Place) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value.detach(), place)
        if type(value) in (list, tuple):
            return type(value)(self._copy(item, (*place, index)) for index, item in enumerate(value))
        if isinstance(value, dict):
            items = {key: self._copy(item, (*place, key)) for key, item in value.items()}
            if type(value) is dict:
                return items
            other = copy.copy(value)  # an OrderedDict with its metadata, as state_dict() makes
            other.update(items)
            return other
        return copy.deepcopy(value)

    def _copy_tensor(self, tensor: Tensor, place: _Place) -> Tensor:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor.cpu().clone()
        memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and memory in self._seen:
            return self._seen[memory]
        place = (tensor.device.type, *place)
        buffer = self._buffers.get(place)
        if buffer is None or (buffer.shape, buffer.dtype, buffer.stride()) != (
            tensor.shape,
            tensor.dtype,
            tensor.stride(),
        ):
            buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        buffer.copy_(tensor, non_blocking=tensor.is_cuda)
        self._waits |= tensor.is_cuda
        self._used[place] = self._seen[memory] = buffer
        return buffer
