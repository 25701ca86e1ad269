"""Sums over bits: every single flip changes them, and where tensors lie in memory does not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpidp.train.replicas import Diverged, Piece, checksum, cut, find_diverged, replicated
from mpidp.train.sharded_state import flat

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex128, torch.bool, torch.int64]


def whole(tensor: torch.Tensor) -> int:
    return int(checksum([Piece(tensor, 0, tensor.numel())]))


@given(size=st.integers(1, 40), dtype=st.sampled_from(DTYPES), data=st.data())
def test_every_flip_is_seen(size: int, dtype: torch.dtype, data: st.DataObject) -> None:
    """Behaviour 35: any bit of any element; bits that are no number (NaN) are bits as well."""
    tensor = torch.arange(size).to(dtype)
    before = whole(tensor)
    raw = tensor.view(torch.uint8)
    index = data.draw(st.integers(0, raw.numel() - 1))
    raw[index] ^= 1 << data.draw(st.integers(0, 0 if dtype == torch.bool else 7))
    assert whole(tensor) != before


@given(size=st.integers(1, 40), offset=st.integers(0, 9), dtype=st.sampled_from(DTYPES))
def test_the_place_in_memory_does_not_matter(size: int, offset: int, dtype: torch.dtype) -> None:
    """Behaviour 35: or equal tensors would be taken for different ones."""
    tensor = torch.arange(size).to(dtype)
    buffer = torch.zeros(size + offset, dtype=dtype)
    buffer[offset:] = tensor
    assert whole(buffer[offset:]) == whole(tensor)


def test_tensors_that_were_exchanged_are_seen() -> None:
    """Behaviour 35."""
    first, second = torch.ones(4), torch.zeros(4)
    pieces = [Piece(first, 0, 4), Piece(second, 0, 4)]
    assert int(checksum(pieces)) != int(checksum(pieces[::-1]))


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    parts=st.integers(1, 20),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=8, max_size=8),
)
def test_pieces_cover_all_once(sizes: list[int], parts: int, dtypes: list[torch.dtype]) -> None:
    """Behaviour 35: every element is in one part, and parts are of a size."""
    tensors = [torch.zeros(size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=False)]
    lists = cut(tensors, parts)
    assert len(lists) == parts
    for tensor in tensors:
        ranges = sorted((p.start, p.stop) for part in lists for p in part if p.tensor is tensor)
        assert [i for start, stop in ranges for i in range(start, stop)] == list(range(tensor.numel()))
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    for part in lists:
        assert sum((p.stop - p.start) * p.tensor.element_size() for p in part) <= -(-total // parts) + 16


def test_dense_tensors_are_not_copied() -> None:
    tensor = torch.arange(24).view(2, 3, 4).permute(2, 0, 1)
    assert flat(tensor).data_ptr() == tensor.data_ptr()
    assert flat(torch.arange(24).view(4, 6)[:, ::2]).tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22]


def test_what_is_replicated() -> None:
    """Behaviours 35 and 52: parameters, optimizer state and persistent buffers by name; running statistics differ."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.BatchNorm1d(2, affine=False))
    model[0].register_buffer("mask", torch.ones(2))
    model[0].register_buffer("cache", torch.ones(2), persistent=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    assert set(replicated(model, [optimizer])) == {
        "buffer 0.mask",
        "parameter 0.weight",
        "optimizer state step of 0.weight",
        "optimizer state exp_avg of 0.weight",
        "optimizer state exp_avg_sq of 0.weight",
    }


@pytest.mark.parametrize(
    ("sums", "found"),
    [
        ([[1, 2], [1, 2], [1, 2]], []),
        ([[1, 2], [1, 3], [1, 2]], [Diverged("b", 0, (1,))]),
        ([[9, 2], [1, 2], [1, 2]], [Diverged("a", 1, (0,))]),
        ([[1, 2], [1, 3]], [Diverged("b", None, (0, 1))]),
        ([[1, 2], [1, 2], [1, 3], [1, 3]], [Diverged("b", None, (0, 1, 2, 3))]),
        ([[1], [2], [1], [3], [1]], [Diverged("a", 0, (1, 3))]),
    ],
)
def test_the_minority_has_diverged(sums: list[list[int]], found: list[Diverged]) -> None:
    """Behaviour 35: without a majority nobody knows who is right."""
    assert find_diverged("ab"[: len(sums[0])], sums) == found
