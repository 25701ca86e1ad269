"""Parameters in, flat gradient buffers out: each `p.grad` is a view of a bucket for the whole run. Knows no MPI."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mpidp.reduce.buffers import Allocate, plain_buffers
from mpidp.reduce.layout import BucketLayout, bucket_layout


@dataclass(frozen=True, eq=False)
class Bucket:
    """One flat buffer.

    Attributes:
        layout: where each gradient lies in it.
        flat: the buffer, one-dimensional and contiguous.
        views: the gradients, shaped and strided like their parameters, in the order of `layout.slots`.
        flags: the buffer's tail, one element a slot: not 0 where some rank had a gradient.
    """

    layout: BucketLayout
    flat: Tensor
    views: tuple[Tensor, ...]
    flags: Tensor


class Buckets:
    """The flat buffers of a model's trainable parameters, and the life of the gradients in them.

    Args:
        parameters: trainable parameters, each once, in the order in which backward finishes them.
        bucket_bytes: size aimed at for one bucket.
        allocate: where the memory of the buckets comes from; called once, for all of them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], bucket_bytes: int, allocate: Allocate = plain_buffers):
        self.parameters = list(parameters)
        layouts = bucket_layout(
            [parameter.numel() for parameter in self.parameters],
            [str(parameter.dtype).removeprefix("torch.") for parameter in self.parameters],
            [parameter.element_size() for parameter in self.parameters],
            bucket_bytes,
        )
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self.buckets = [
            self._make(layout, flat) for layout, flat in zip(layouts, allocate(layouts, device), strict=True)
        ]
        self._views = {
            slot.parameter: view
            for bucket in self.buckets
            for slot, view in zip(bucket.layout.slots, bucket.views, strict=True)
        }
        # Gradients that had to be copied into their bucket because autograd made a tensor of its own: with
        # create_graph=True, or when somebody assigned p.grad. Zero in an ordinary loop.
        self.copies = 0

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers."""
        return sum(bucket.layout.num_bytes for bucket in self.buckets)

    def expect(self, index: int) -> None:
        """A gradient of parameter `index` is about to be accumulated: make `p.grad` its view, zeroed if it was None.

        Zeroing here, just before autograd adds to it, finds the memory in the cache for the addition; one pass over
        the whole buffer beforehand would not.
        """
        parameter = self.parameters[index]
        if parameter.grad is None:
            view = self._views[index]
            view.zero_()
            parameter.grad = view

    def pack(self, bucket: Bucket) -> None:
        """Makes the buffer ready to be summed: unused gradients zero, strays copied in, flags set."""
        # Whether there is a gradient now, not whether there was one: zero_grad() may have dropped it since.
        used = [self.parameters[slot.parameter].grad is not None for slot in bucket.layout.slots]
        if all(used):
            bucket.flags.fill_(1)
        else:
            bucket.flags.copy_(torch.tensor(used, dtype=bucket.flags.dtype))
        for slot, view in zip(bucket.layout.slots, bucket.views, strict=True):
            parameter = self.parameters[slot.parameter]
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                self._take_in(parameter, view)

    def unpack(self, bucket: Bucket) -> None:
        """After the sum: a gradient that only other ranks had appears here; one that no rank had stays None."""
        missing = [i for i, slot in enumerate(bucket.layout.slots) if self.parameters[slot.parameter].grad is None]
        if missing:
            flags = bucket.flags.tolist()  # waits for the device; only where a parameter went unused
            for i in missing:
                if flags[i]:
                    self.parameters[bucket.layout.slots[i].parameter].grad = bucket.views[i]

    def release(self) -> None:
        """Gives the parameters gradients of their own, as if the buckets had never been."""
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is self._views[index]:
                parameter.grad = self._views[index].clone()

    def _take_in(self, parameter: nn.Parameter, view: Tensor) -> None:
        assert parameter.grad is not None
        if parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad.detach())
            if view.is_cuda:  # it may be freed on another stream while this one still copies
                parameter.grad.record_stream(torch.cuda.current_stream(view.device))
            self.copies += 1
        parameter.grad = view

    def _make(self, layout: BucketLayout, flat: Tensor) -> Bucket:
        assert flat.shape == (layout.numel,) and flat.is_contiguous()
        views = tuple(
            flat[slot.offset : slot.offset + slot.numel].as_strided(
                self.parameters[slot.parameter].shape,
                torch.empty_like(self.parameters[slot.parameter]).stride(),  # keeps channels_last and the like
                slot.offset + flat.storage_offset(),
            )
            for slot in layout.slots
        )
        return Bucket(layout, flat, views, flat[layout.flags_offset :])
