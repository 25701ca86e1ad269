"""Flat buffers for gradients: each `p.grad` is a view of a bucket for the whole run; and the base class of reducers.

The layout of the buckets is plain arithmetic; nothing here uses MPI. A reducer replaces each bucket by its mean over
the ranks. Reducers differ only in how they do it; `naive` is the specification that the others are tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mpidp.errors import MpidpError

if TYPE_CHECKING:
    from mpidp.reduce.transport import ReducerOptions
    from mpidp.world.world import World

# Each gradient starts on a cache line, so that vector kernels and the slices of several ranks never share one.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Slot:
    """Where one parameter's gradient lies: `numel` elements from `offset` on."""

    parameter: int
    offset: int
    numel: int


@dataclass(frozen=True)
class BucketLayout:
    """The layout of a flat buffer of one dtype: the slots of gradients, then a flag for each slot."""

    dtype: torch.dtype
    slots: tuple[Slot, ...]
    flags_offset: int

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return self.flags_offset + len(self.slots)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole buffer."""
        return self.numel * self.dtype.itemsize


def bucket_layout(parameters: Sequence[Tensor], bucket_bytes: int) -> list[BucketLayout]:
    """Divides parameters, in the order given, into buckets of one dtype each. Pure.

    A bucket is closed when the next gradient of its dtype would take it over `bucket_bytes`; a gradient larger than
    that gets a bucket of its own. Buckets come in the order in which they are complete.

    Args:
        parameters: in the order in which backward finishes them; only their sizes and dtypes count.
        bucket_bytes: intended size; positive.

    Raises:
        ValueError: `bucket_bytes` is not positive.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes = {bucket_bytes}: must be positive, for example {8 * 2**20}")
    closed: list[BucketLayout] = []
    growing: dict[torch.dtype, tuple[list[Slot], int]] = {}  # slots, and where they end
    for number, parameter in enumerate(parameters):
        numel, dtype = parameter.numel(), parameter.dtype
        slots, end = growing.get(dtype, ([], 0))
        if slots and (end + numel) * dtype.itemsize > bucket_bytes:
            closed.append(BucketLayout(dtype, tuple(slots), end))
            slots, end = [], 0
        slots.append(Slot(number, end, numel))
        line = max(1, ALIGNMENT_BYTES // dtype.itemsize)
        growing[dtype] = (slots, -(-(end + numel) // line) * line)
    rest = [BucketLayout(dtype, tuple(slots), end) for dtype, (slots, end) in growing.items()]
    return closed + sorted(rest, key=lambda bucket: bucket.slots[-1].parameter)


Allocate = Callable[[Sequence[BucketLayout], torch.device], list[Tensor]]


def plain_buffers(layouts: Sequence[BucketLayout], device: torch.device) -> list[Tensor]:
    """One zeroed one-dimensional tensor a layout."""
    return [torch.zeros(layout.numel, dtype=layout.dtype, device=device) for layout in layouts]


@dataclass(frozen=True, eq=False)
class Bucket:
    """One flat buffer.

    Attributes:
        layout: where each gradient lies in it.
        flat: the buffer, one-dimensional and contiguous.
        flags: the buffer's tail, one element a slot: not 0 where some rank had a gradient.
    """

    layout: BucketLayout
    flat: Tensor
    flags: Tensor


class Buckets:
    """The flat buffers of a model's trainable parameters, and the handling of gradients in them.

    Args:
        parameters: trainable parameters, each once, in the order in which backward finishes them.
        bucket_bytes: intended size of one bucket.
        allocate: allocates the memory of the buckets; called once, for all of them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], bucket_bytes: int, allocate: Allocate = plain_buffers):
        self.parameters = list(parameters)
        layouts = bucket_layout(self.parameters, bucket_bytes)
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self.buckets = [
            Bucket(layout, flat, flat[layout.flags_offset :])
            for layout, flat in zip(layouts, allocate(layouts, device), strict=True)
        ]
        self._places = {slot.parameter: (bucket, slot) for bucket in self.buckets for slot in bucket.layout.slots}
        # As at the start, the same on all ranks: a rank that changes its own strides must not permute the sum.
        self._shapes = [parameter.shape for parameter in self.parameters]
        self._strides = [torch.empty_like(parameter).stride() for parameter in self.parameters]
        # The gradients in their buckets, and their addresses: an assignment to `p.grad.data` or a call of `module.to`
        # moves these same tensors to other memory.
        self._views = [self._make_view(index) for index in range(len(self.parameters))]
        self._addresses = [view.data_ptr() for view in self._views]
        # Gradients that had to be copied into their bucket because autograd made a tensor of its own: with
        # create_graph=True, or when the program assigned p.grad. Zero in an ordinary loop.
        self.copies = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(bucket.layout.num_bytes for bucket in self.buckets)

    def expect(self, index: int) -> None:
        """Makes `p.grad` of parameter `index` its view, zeroed if it was None, before a gradient is accumulated.

        Zeroing it here, just before autograd adds to it, leaves the memory in the cache; one pass over the whole buffer
        beforehand would not.
        """
        parameter = self.parameters[index]
        if parameter.grad is None:
            view = self.view(index)
            view.zero_()
            try:
                parameter.grad = view
            except RuntimeError as error:  # of another shape, dtype or device
                raise MpidpError(
                    f"a parameter of shape {tuple(view.shape)}, {view.dtype} on {view.device} is now of shape "
                    f"{tuple(parameter.shape)}, {parameter.dtype} on {parameter.device}: change the model before it is "
                    f"wrapped, or take it out by unwrap() and wrap it again"
                ) from error

    def view(self, index: int) -> Tensor:
        """The gradient of parameter `index` in its bucket, shaped and strided like the parameter was at the start."""
        if self._views[index].data_ptr() != self._addresses[index]:
            self._views[index] = self._make_view(index)
        return self._views[index]

    def is_in_bucket(self, index: int) -> bool:
        """Whether the gradient of parameter `index` lies in its bucket, or there is none."""
        gradient = self.parameters[index].grad
        return gradient is None or gradient.data_ptr() == self._addresses[index]

    def take_in(self, index: int) -> None:
        """Copies a gradient that lies elsewhere into its bucket."""
        parameter, view = self.parameters[index], self.view(index)
        assert parameter.grad is not None
        if parameter.grad.data_ptr() != self._addresses[index]:
            view.copy_(parameter.grad.detach())
            if view.is_cuda:  # it may be freed on another stream while this one still copies
                parameter.grad.record_stream(torch.cuda.current_stream(view.device))
            self.copies += 1
        parameter.grad = view

    def pack(self, bucket: Bucket) -> None:
        """Prepares the buffer for the sum: zeroes unused gradients, copies in those that lie elsewhere, sets flags."""
        # Whether there is a gradient now, not whether there was one: zero_grad() may have dropped it since.
        used = [self.parameters[slot.parameter].grad is not None for slot in bucket.layout.slots]
        if all(used):
            bucket.flags.fill_(1)
        else:
            bucket.flags.copy_(torch.tensor(used, dtype=bucket.flags.dtype))
        for slot in bucket.layout.slots:
            gradient = self.parameters[slot.parameter].grad
            if gradient is None:
                self.view(slot.parameter).zero_()
            elif gradient is not self._views[slot.parameter] or not self.is_in_bucket(slot.parameter):
                self.take_in(slot.parameter)

    def unpack(self, bucket: Bucket) -> None:
        """Sets `p.grad` after the sum, also where only other ranks had a gradient; without any it stays None."""
        missing = [i for i, slot in enumerate(bucket.layout.slots) if self.parameters[slot.parameter].grad is None]
        if missing:
            flags = bucket.flags.tolist()  # waits for the device; only where a parameter went unused
            for i in missing:
                if flags[i]:
                    index = bucket.layout.slots[i].parameter
                    self.parameters[index].grad = self.view(index)

    def release(self) -> None:
        """Gives the parameters gradients in memory of their own, as without buckets."""
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None and self.is_in_bucket(index):
                parameter.grad = parameter.grad.clone()

    def _make_view(self, index: int) -> Tensor:
        bucket, slot = self._places[index]
        assert bucket.flat.shape == (bucket.layout.numel,) and bucket.flat.is_contiguous()
        shape, start = self._shapes[index], slot.offset + bucket.flat.storage_offset()
        return bucket.flat[slot.offset : slot.offset + slot.numel].as_strided(shape, self._strides[index], start)


class Reducer:
    """Base class of the reducers, which average buckets over ranks. Making one may be collective.

    Args:
        world: the ranks.
        options: of the reducer.
    """

    def __init__(self, world: World, options: ReducerOptions):
        self._world, self._options = world, options

    def allocate(self, layouts: Sequence[BucketLayout], device: torch.device) -> list[Tensor]:
        """Returns zeroed memory for the buckets, of the kind that this reducer needs. May be collective."""
        return plain_buffers(layouts, device)

    def mean(self, bucket: Bucket) -> None:
        """Replaces `bucket.flat` by its mean over the ranks, in place. Collective, in the same order on every rank.

        When it returns, work queued on the current stream afterwards sees the mean.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Drops the memory of `allocate`, which is freed with the last tensor that refers to it. Not collective."""
