"""Parameter sizes in, places in flat buckets out. Pure arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass

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
    """One flat buffer of one dtype: the gradients' slots, then one element a slot that says whether it was used."""

    dtype: str
    itemsize: int
    slots: tuple[Slot, ...]
    flags_offset: int

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return self.flags_offset + len(self.slots)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole buffer."""
        return self.numel * self.itemsize


def bucket_layout(
    numels: Sequence[int], dtypes: Sequence[str], itemsizes: Sequence[int], bucket_bytes: int
) -> list[BucketLayout]:
    """Deals parameters, in the order given, into buckets of one dtype each.

    A bucket is closed when the next gradient of its dtype would take it over `bucket_bytes`; a gradient larger than
    that gets a bucket of its own. Buckets come in the order in which they are complete.

    Args:
        numels: elements of each parameter, in the order in which backward finishes them.
        dtypes: name of each parameter's dtype.
        itemsizes: bytes of an element of each.
        bucket_bytes: size aimed at; positive.

    Raises:
        ValueError: `bucket_bytes` is not positive.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes = {bucket_bytes}: must be positive, for example {8 * 2**20}")
    closed: list[BucketLayout] = []
    growing: dict[str, tuple[int, list[Slot], int]] = {}  # dtype -> itemsize, slots, end
    for parameter, (numel, dtype, itemsize) in enumerate(zip(numels, dtypes, itemsizes, strict=True)):
        _, slots, end = growing.get(dtype, (itemsize, [], 0))
        if slots and (end + numel) * itemsize > bucket_bytes:
            closed.append(BucketLayout(dtype, itemsize, tuple(slots), end))
            slots, end = [], 0
        slots.append(Slot(parameter, end, numel))
        growing[dtype] = (itemsize, slots, _align(end + numel, itemsize))
    rest = [BucketLayout(dtype, size, tuple(slots), end) for dtype, (size, slots, end) in growing.items()]
    return closed + sorted(rest, key=lambda bucket: bucket.slots[-1].parameter)


def _align(offset: int, itemsize: int) -> int:
    elements = max(1, ALIGNMENT_BYTES // itemsize)
    return -(-offset // elements) * elements
