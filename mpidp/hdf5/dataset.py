"""Enters: what `describe` found in HDF5 files. Leaves: one data set, its fields, rows and chunks.

Plain numbers and names, no handles, so it can be pickled and sent to other ranks. Files are laid end to end.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidp.hdf5.keyed import IntArray

# torch has few operators for unsigned integers of more than 8 bits, so they are read as the next signed type.
_WIDER: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype("u2"): np.dtype("i4"),
    np.dtype("u4"): np.dtype("i8"),
    np.dtype("u8"): np.dtype("i8"),
}


@dataclass(frozen=True)
class Field:
    """A dataset with an array of `shape` for each sample; `stored` is its dtype in native byte order."""

    name: str
    shape: tuple[int, ...]
    stored: np.dtype[Any]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype in memory: `stored`, or for uint16, uint32 and uint64 int32, int64 and int64."""
        return _WIDER.get(self.stored, self.stored)

    @property
    def row_bytes(self) -> int:
        """Bytes of one sample in memory."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class StoredFile:
    """One file. `range_rows` rows are read together: a chunk's height, or about 1 MiB without chunks."""

    path: str
    size_bytes: int
    num_rows: int
    range_rows: int
    chunked: bool


@dataclass(frozen=True)
class DataSet:
    """Fields over the rows of all files. A *chunk* is a range of rows of one file that are read together."""

    fields: tuple[Field, ...]
    files: tuple[StoredFile, ...]

    @property
    def num_rows(self) -> int:
        """Rows of all files together."""
        return sum(file.num_rows for file in self.files)

    @property
    def row_bytes(self) -> int:
        """Bytes in memory of one row of all fields."""
        return sum(field.row_bytes for field in self.fields)

    @property
    def mean_chunk_bytes(self) -> float:
        """Mean bytes in memory of the rows of a chunk, all fields together."""
        return self.num_rows * self.row_bytes / len(self.chunk_rows)

    @cached_property
    def chunk_rows(self) -> IntArray:
        """Number of rows of each chunk, int64."""
        return np.concatenate([_heights(file) for file in self.files])

    @cached_property
    def chunk_starts(self) -> IntArray:
        """First row of each chunk, counted over all files, int64."""
        return np.cumsum(self.chunk_rows) - self.chunk_rows

    @cached_property
    def file_starts(self) -> IntArray:
        """First row of each file, counted over all files, int64."""
        rows = np.array([file.num_rows for file in self.files], dtype=np.int64)
        return np.cumsum(rows) - rows

    def file_of(self, row: int) -> tuple[int, int]:
        """Return (file number, row in that file) of a row counted over all files."""
        file = int(np.searchsorted(self.file_starts, row, side="right")) - 1
        return file, row - int(self.file_starts[file])


@dataclass(frozen=True)
class Rows:
    """Values of every field for some rows, and `numbers`, their row numbers over all files (int64)."""

    fields: dict[str, npt.NDArray[Any]]
    numbers: IntArray

    @classmethod
    def empty(cls, fields: tuple[Field, ...], count: int) -> "Rows":
        """Return room for `count` rows, not yet filled."""
        arrays = {field.name: np.empty((count, *field.shape), dtype=field.dtype) for field in fields}
        return cls(arrays, np.empty(count, dtype=np.int64))

    def view(self, start: int, stop: int) -> "Rows":
        """Return rows [start, stop), sharing memory."""
        return Rows({name: array[start:stop] for name, array in self.fields.items()}, self.numbers[start:stop])

    def take(self, index: IntArray) -> "Rows":
        """Return a copy of the rows at `index`."""
        arrays = {name: array.take(index, axis=0) for name, array in self.fields.items()}
        return Rows(arrays, self.numbers.take(index))

    def put(self, where: IntArray, rows: "Rows") -> None:
        """Copy `rows` to the places `where`."""
        for name, array in self.fields.items():
            array[where] = rows.fields[name]
        self.numbers[where] = rows.numbers

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return self.numbers.nbytes + sum(array.nbytes for array in self.fields.values())


def _heights(file: StoredFile) -> IntArray:
    whole, rest = divmod(file.num_rows, file.range_rows)
    heights = np.full(whole + (rest > 0), file.range_rows, dtype=np.int64)
    if rest:
        heights[-1] = rest
    return heights
