"""A length in, the spans out in which it may be given to MPI. Pure arithmetic."""

from collections.abc import Iterator

# MPI counts are C ints, and libraries compute byte offsets in them too: stay far below 2^31 of either.
MAX_PIECE_BYTES = 1 << 30


def pieces(numel: int, itemsize: int, piece_bytes: int = MAX_PIECE_BYTES) -> Iterator[slice]:
    """Consecutive slices that cover `range(numel)`, each of at most `piece_bytes` bytes (at least one element)."""
    step = max(1, min(piece_bytes, MAX_PIECE_BYTES) // itemsize)
    for start in range(0, numel, step):
        yield slice(start, min(start + step, numel))
