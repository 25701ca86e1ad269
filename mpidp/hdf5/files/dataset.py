"""Enters: what `describe` found in HDF5 files. Leaves: one data set, its fields, rows and chunks.

Plain numbers and names, no handles, so it can be pickled and sent to other ranks. Files are laid end to end.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidp.hdf5.decode.field import Decode, Field
from mpidp.hdf5.decode.storage import Storage
from mpidp.hdf5.decode.unpack import Packing
from mpidp.hdf5.order.keyed import IntArray

_LEAST_ROW_BYTES = 256


@dataclass(frozen=True, eq=False)
class StoredFile:
    """One file of a data set.

    `range_rows` rows are read together: some chunks of the field with most bytes a row, or about 1 MiB where
    nothing is chunked. `sizes` are the bytes of this file and of those that its external links lead to, by
    path. For each field, `storages` says where its bytes lie; where they can only be read by HDF5 itself that
    is None, and `slow` says why. `packings`: how values of fields that are unpacked are packed in this file.
    `digests` are of some values of each field (see `fingerprint.py`).
    """

    path: str
    sizes: Mapping[str, int]
    num_rows: int
    range_rows: int
    chunked: bool
    storages: tuple[Storage | None, ...]
    slow: tuple[str, ...]
    packings: tuple[Packing | None, ...]
    digests: tuple[str, ...] = ()

    def moved(self, places: Mapping[str, str]) -> "StoredFile":
        """Return the same file, copied; `places` has the path of each copy by that of its source.

        A dataset that HDF5 reads through an external link is still found by that link, in the source.
        """
        storages = (storage and replace(storage, path=places[storage.path]) for storage in self.storages)
        # The copy lies in another folder, from where a link would lead nowhere or to another file.
        by_link = None in self.storages and len(self.sizes) > 1
        return replace(self, path=self.path if by_link else places[self.path], storages=tuple(storages))


@dataclass(frozen=True, eq=False)
class DataSet:
    """Fields over the rows of all files. A *chunk* is a range of rows of one file that are read together."""

    fields: tuple[Field, ...]
    files: tuple[StoredFile, ...]
    # By the name of the field. Functions of the user's, which each rank has itself: they are not sent.
    decoders: Mapping[str, Decode] = field(default_factory=dict, repr=False)
    # Of a loader that takes a part of a split: the rows of that part.
    num_selected: int | None = None

    def __len__(self) -> int:
        """Return the number of rows that the loader of this data set takes."""
        return self.num_rows if self.num_selected is None else self.num_selected

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
        """Mean of what the rows of a chunk cost to mix, in bytes: their own in memory, but at least 256 a row.

        However small a row is, its place is drawn and sorted, in some 0.1 us.
        """
        return self.num_rows * max(self.row_bytes, _LEAST_ROW_BYTES) / len(self.chunk_rows)

    @property
    def paths(self) -> tuple[str, ...]:
        """All files that hold data: those given, and those that their external links lead to."""
        return tuple(dict.fromkeys(path for file in self.files for path in file.sizes))

    def moved(self, places: Mapping[str, str]) -> "DataSet":
        """Return the same data, in copies of the files at `places`, which has the path of each copy by its source."""
        return replace(self, files=tuple(file.moved(places) for file in self.files))

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
        file = bisect_right(self._file_starts, row) - 1
        return file, row - self._file_starts[file]

    @cached_property
    def _file_starts(self) -> list[int]:
        # Asked for a single row, a list is found in five times as fast as an array.
        return [int(start) for start in self.file_starts]


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

    def take_from(self, source: "Rows", index: IntArray, where: IntArray) -> None:
        """Copy the rows of `source` at `index` to the places `where`."""
        if not len(where):
            return
        first = int(where[0])
        run = len(where) == int(where[-1]) - first + 1 and bool((np.diff(where) == 1).all())
        for name, array in self.fields.items():
            if run:  # straight there; "clip" only because "raise" would copy once more
                source.fields[name].take(index, axis=0, out=array[first : first + len(where)], mode="clip")
            else:
                array[where] = source.fields[name].take(index, axis=0)
        self.numbers[where] = source.numbers.take(index)

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
