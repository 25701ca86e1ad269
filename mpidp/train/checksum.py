"""Checksums of tensors: equal for equal bits, and different after any single bit flip.

A sum of 64-bit words costs one reading of the memory, on a CPU or a GPU, and no wait for a GPU.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

WORD_BYTES = 8


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a tensor, laid flat as they lie in memory."""

    tensor: Tensor
    start: int
    stop: int


def replicated(module: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """All tensors of a model in training that must be equal on all ranks, by name.

    These are parameters, the optimizers' state of each, and persistent buffers; not running statistics of batch norm,
    as each rank has those of its own samples.
    """
    tensors: dict[str, Tensor] = {}
    states = [optimizer.state for optimizer in optimizers]
    for name, parameter in module.named_parameters():
        tensors[f"parameter {name}"] = parameter.detach()
        for state in states:
            for key, value in state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer state {key} of {name}"] = value
    for prefix, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase):
            continue
        for name, buffer in layer.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in layer._non_persistent_buffers_set:
                tensors[f"buffer {name}"] = buffer
    return {name: tensor for name, tensor in tensors.items() if tensor.numel()}


def flat(tensor: Tensor) -> Tensor:
    """All elements in one dimension: a view if they are dense in memory, in any order, else a copy."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda axis: -strides[axis])
    transposed = tensor.permute(order)
    return transposed.view(-1) if transposed.is_contiguous() else tensor.reshape(-1)


def flat_like(tensor: Tensor, model: Tensor) -> Tensor:
    """All elements in one dimension, in the memory order of another tensor of its shape."""
    alike = tensor.stride() == model.stride() or (tensor.is_contiguous() and model.is_contiguous())
    return flat(tensor if alike else torch.empty_like(model, dtype=tensor.dtype, device=tensor.device).copy_(tensor))


def cut(tensors: Sequence[Tensor], parts: int) -> list[list[Piece]]:
    """Lists of pieces of all tensors, with about equally many bytes each."""
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    size = max(1, -(-total // parts))
    lists: list[list[Piece]] = [[] for _ in range(parts)]
    offset = 0  # in bytes, of this tensor in all of them
    for tensor in tensors:
        item, start = tensor.element_size(), 0
        while start < tensor.numel():
            part = (offset + start * item) // size
            stop = min(tensor.numel(), -(-((part + 1) * size - offset) // item))
            lists[part].append(Piece(tensor, start, stop))
            start = stop
        offset += tensor.numel() * item
    return lists


def checksum(pieces: Sequence[Piece]) -> Tensor:
    """One int64, on the device of the first tensor, weighted by position, so that swapped pieces are found."""
    sums = [part for piece in pieces for part in _sums(flat(piece.tensor)[piece.start : piece.stop])]
    device = sums[0].device
    total = torch.zeros((), dtype=torch.int64, device=device)
    for position, part in enumerate(sums):
        total += part.to(device, non_blocking=True) * (2 * position + 1)  # odd: multiplying loses no bit
    return total


def _sums(elements: Tensor) -> Iterator[Tensor]:
    """Of whole words, and of the bytes that are left over."""
    item = elements.element_size()
    if item > WORD_BYTES or WORD_BYTES % item:
        yield elements.view(torch.uint8).sum(dtype=torch.int64)
        return
    words = elements.numel() // (WORD_BYTES // item) * (WORD_BYTES // item)
    if words:
        # A view of words must begin where a word does; and ranks may differ in where that is.
        head = elements[:words]
        aligned = head if head.storage_offset() * item % WORD_BYTES == 0 else head.clone()
        yield aligned.view(torch.int64).sum()
    if words < elements.numel():
        yield elements[words:].view(torch.uint8).sum(dtype=torch.int64)
