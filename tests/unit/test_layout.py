"""The layout of buckets and the pieces given to MPI, for parameters of many sizes."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpidp.reduce.buckets import ALIGNMENT_BYTES, BucketLayout, bucket_layout
from mpidp.reduce.transport import MAX_PIECE_BYTES, pieces

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex128]
PARAMETERS = st.lists(st.tuples(st.integers(0, 3000), st.sampled_from(DTYPES)), max_size=40)
BUCKET_BYTES = st.integers(1, 20_000)


def lay_out(parameters: list[tuple[int, torch.dtype]], bucket_bytes: int) -> list[BucketLayout]:
    tensors = [torch.empty(numel, dtype=dtype, device="meta") for numel, dtype in parameters]
    return bucket_layout(tensors, bucket_bytes)


@given(PARAMETERS, BUCKET_BYTES)
def test_each_parameter_has_one_slot(parameters: list[tuple[int, torch.dtype]], bucket_bytes: int) -> None:
    """Behaviour 1: of its size and dtype, aligned, without overlap, in backward's order, in buckets of bounded size."""
    buckets = lay_out(parameters, bucket_bytes)
    placed = {slot.parameter: (slot.numel, bucket.dtype) for bucket in buckets for slot in bucket.slots}
    assert placed == dict(enumerate(parameters))
    assert sum(len(bucket.slots) for bucket in buckets) == len(parameters)
    for bucket in buckets:
        end = bucket.slots[-1].offset + bucket.slots[-1].numel
        assert all(slot.offset * bucket.dtype.itemsize % ALIGNMENT_BYTES == 0 for slot in bucket.slots)
        assert all(first.offset + first.numel <= second.offset for first, second in pairwise(bucket.slots))
        assert all(first.parameter < second.parameter for first, second in pairwise(bucket.slots))
        assert end <= bucket.flags_offset and bucket.numel == bucket.flags_offset + len(bucket.slots)
        one_alone = sum(slot.numel > 0 for slot in bucket.slots) <= 1
        assert end * bucket.dtype.itemsize <= bucket_bytes or one_alone
    for dtype in DTYPES:  # whichever bucket backward completes first may be sent first
        ends = [bucket.slots[-1].parameter for bucket in buckets if bucket.dtype == dtype]
        assert ends == sorted(ends)


@pytest.mark.parametrize("bucket_bytes", [0, -1])
def test_bucket_bytes_must_be_positive(bucket_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"bucket_bytes = {bucket_bytes}"):
        lay_out([(3, torch.float32)], bucket_bytes)


@given(st.integers(0, 5000), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 5000))
def test_pieces_cover_exactly_and_stay_small(numel: int, itemsize: int, piece_bytes: int) -> None:
    """Behaviour 5."""
    spans = list(pieces(numel, itemsize, piece_bytes))
    assert [i for span in spans for i in range(span.start, span.stop)] == list(range(numel))
    assert all((span.stop - span.start) * itemsize <= piece_bytes or span.stop - span.start == 1 for span in spans)


@given(st.integers(2**31 - 2, 2**36), st.sampled_from([1, 2, 4, 8]))
def test_pieces_of_huge_buffers_fit_in_c_ints(numel: int, itemsize: int) -> None:
    """Behaviour 5: above 2^31 elements or bytes, and whatever size of piece is asked for."""
    for piece_bytes in (MAX_PIECE_BYTES, 2**40):
        spans = list(pieces(numel, itemsize, piece_bytes))
        assert spans[0].start == 0 and spans[-1].stop == numel
        assert all(first.stop == second.start for first, second in pairwise(spans))
        assert all(0 < (span.stop - span.start) * itemsize < 2**31 for span in spans)
