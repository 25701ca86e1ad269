"""Bucket layouts in, zeroed memory for them out: torch's own."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpidp.reduce.layout import BucketLayout

Allocate = Callable[[Sequence[BucketLayout], torch.device], list[Tensor]]


def plain_buffers(layouts: Sequence[BucketLayout], device: torch.device) -> list[Tensor]:
    """One zeroed one-dimensional tensor a layout."""
    return [torch.zeros(layout.numel, dtype=torch_dtype(layout), device=device) for layout in layouts]


def torch_dtype(layout: BucketLayout) -> torch.dtype:
    """The dtype that a layout, which knows no torch, names."""
    dtype = getattr(torch, layout.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
