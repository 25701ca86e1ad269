"""Enters: what HDF5 knows of a dataset's place on disk. Leaves: where the bytes of any of its rows lie.

Plain numbers, so that one rank can find them out and send them to all; nothing here opens a file. A *block* is
one layer of chunks: `block_rows` samples, cut into *tiles* (one chunk each) along the other axes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidp.hdf5.order.keyed import IntArray

FilterMasks = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Filter:
    """A step of HDF5's filter pipeline: its registered number, HDF5's name for it, and its parameters."""

    number: int
    name: str
    values: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Storage:
    """Where and how the values of one dataset are stored, in bytes of a file.

    path: the file that holds the bytes; not the one that was asked for where an external link leads on.
    dtype: as stored, byte order included. shape: of the whole dataset, in stored order of axes.
    axis: the axis that counts samples. chunk: shape of a chunk; without chunks, that of a row.
    filters: in the order they were applied when writing.
    offsets, sizes: int64 (blocks, tiles), bytes from the start of the file; masks: uint32 of the same shape,
    bit i set where filter i was skipped, or None where none was. Without chunks, one offset and one size. A
    chunk that was never written has offset -1 and reads as `fill`.
    inline: the values themselves, where they lie in the dataset's header ("compact"); offsets then count in them.
    """

    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    axis: int
    chunk: tuple[int, ...]
    chunked: bool
    filters: tuple[Filter, ...]
    offsets: IntArray
    sizes: IntArray
    masks: FilterMasks | None
    fill: bytes = b""
    inline: bytes = b""

    @property
    def num_rows(self) -> int:
        """The number of samples."""
        return self.shape[self.axis]

    @property
    def block_rows(self) -> int:
        """Samples of a block: the height of a chunk along the sample axis; 1 without chunks."""
        return self.chunk[self.axis]

    @cached_property
    def chunk_bytes(self) -> int:
        """Bytes of a whole chunk once its filters are undone; of a row without chunks."""
        return int(np.prod(self.chunk, dtype=np.int64)) * self.dtype.itemsize

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row where `is_row_wise`, once filters are undone."""
        return self.chunk_bytes // self.block_rows

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of a block once filters are undone, padding of edge chunks included."""
        return self.chunk_bytes * self.tiles_per_block

    @cached_property
    def tiles_per_block(self) -> int:
        """The number of chunks that a block is cut into."""
        return int(np.prod([count for axis, count in enumerate(self.grid) if axis != self.axis], dtype=np.int64))

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """The number of chunks along each axis, in stored order."""
        return tuple(-(-length // step) for length, step in zip(self.shape, self.chunk, strict=True))

    @cached_property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a stored sample: all axes but the sample axis."""
        return self.shape[: self.axis] + self.shape[self.axis + 1 :]

    @property
    def is_plain(self) -> bool:
        """Whether whole rows lie in the file one after another, as they are, so that any may be read alone."""
        return not self.chunked and self.axis == 0

    @cached_property
    def is_row_wise(self) -> bool:
        """Whether a block is one chunk of whole rows, one after another."""
        return self.axis == 0 and self.chunk[1:] == self.shape[1:]

    @cached_property
    def is_raw(self) -> bool:
        """Whether every row lies in the file as it is, in one piece, so that any may be read alone."""
        return self.is_row_wise and not self.filters

    def block_height(self, block: int) -> int:
        """Return the number of samples in a block; the last may be lower."""
        return min(self.block_rows, self.num_rows - block * self.block_rows)

    def tiles(self) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Yield, for each tile, where it lies in a row and which part of the chunk is not padding.

        Both are slices of the axes of a row, `row_shape`.
        """
        steps = self.chunk[: self.axis] + self.chunk[self.axis + 1 :]
        counts = self.grid[: self.axis] + self.grid[self.axis + 1 :]
        for place in np.ndindex(*counts):
            starts = [number * step for number, step in zip(place, steps, strict=True)]
            stops = [min(start + step, end) for start, step, end in zip(starts, steps, self.row_shape, strict=True)]
            within_row = tuple(slice(start, stop) for start, stop in zip(starts, stops, strict=True))
            within_chunk = tuple(slice(0, stop - start) for start, stop in zip(starts, stops, strict=True))
            yield within_row, within_chunk
