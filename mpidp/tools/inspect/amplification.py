"""Shapes and chunks of the fields of a run enter; bytes decoded for each byte used leave. Arithmetic only."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Order = Literal["lanes", "full", "none"]


@dataclass(frozen=True)
class StoredField:
    """A dataset whose first axis counts the samples: shape, chunk shape (None without chunks), bytes of a value."""

    shape: tuple[int, ...]
    chunks: tuple[int, ...] | None
    itemsize: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape[1:]) * self.itemsize

    @property
    def decoded_row_bytes(self) -> int:
        """Bytes that a row takes in its chunks, what pads them at the edges included."""
        if self.chunks is None:
            return self.row_bytes
        padded = (-(-n // c) * c for n, c in zip(self.shape[1:], self.chunks[1:], strict=True))
        return math.prod(padded) * self.itemsize


def amplification(fields: Sequence[StoredField], range_rows: int, order: Order) -> float:
    """Return the bytes decoded for each byte used in an epoch, where nothing decoded is kept for later.

    Args:
        fields: the fields of a run, with equal numbers of rows, at least one.
        range_rows: how many rows the loader reads together.
        order: "lanes" reads such ranges once each, in any order; "full" reads single rows; "none" goes through the
            file once.
    """
    num_rows = fields[0].shape[0]
    decoded = sum(_decoded_rows(field, num_rows, range_rows, order) * field.decoded_row_bytes for field in fields)
    return decoded / (num_rows * sum(field.row_bytes for field in fields))


def _decoded_rows(field: StoredField, num_rows: int, range_rows: int, order: Order) -> int:
    """Return how many rows of a field are decoded, counting each as often as it is."""
    if field.chunks is None:
        return num_rows
    height = field.chunks[0]
    if order == "full":
        return num_rows * height
    if order == "none":
        return -(-num_rows // height) * height
    starts = np.arange(0, num_rows, range_rows, dtype=np.int64)
    lasts = np.minimum(starts + range_rows, num_rows) - 1
    return int((lasts // height - starts // height + 1).sum()) * height
