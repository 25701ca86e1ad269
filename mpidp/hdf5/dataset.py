"""The description of a data set: its fields, its files, and where the bytes of their rows lie.

Plain numbers and names, no handles, so that one rank can find them out and send them to all; nothing here opens a
file. Files are laid end to end. A *block* of a dataset is one layer of chunks: `block_rows` samples, cut into *tiles*
(one chunk each) along the other axes.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidp.hdf5.field import Decode, Field, Packing
from mpidp.hdf5.plan import IntArray

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

    Attributes:
        path: the file that holds the bytes; not the one that was asked for where an external link leads on.
        dtype: as stored, byte order included.
        shape: of the whole dataset, in stored order of axes.
        axis: the axis that counts samples.
        chunk: shape of a chunk; without chunks, that of a row.
        chunked: whether there are chunks.
        filters: in the order they were applied when writing.
        offsets: int64 (blocks, tiles), bytes from the start of the file; -1 for a chunk that was never written.
            Without chunks, one offset, and one size.
        sizes: int64 (blocks, tiles), bytes as stored.
        masks: uint32 (blocks, tiles), bit i set where filter i was skipped; None where none was.
        fill: bytes of the value that chunks read as which were never written.
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
        """Bytes of a stored sample, once filters are undone."""
        return int(np.prod(self.row_shape, dtype=np.int64)) * self.dtype.itemsize

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


_LEAST_ROW_BYTES = 256


@dataclass(frozen=True, eq=False)
class StoredFile:
    """One file of a data set.

    Attributes:
        path: as it was given, absolute.
        sizes: bytes of this file and of those that its external links lead to, by path.
        num_rows: of every field.
        range_rows: rows that are read together: some chunks of the field with most bytes a row, or about 1 MiB
            where nothing is chunked.
        chunked: whether any field is.
        storages: where the bytes of each field lie; None where only HDF5 itself can read them.
        slow: for each field why that is so, or "".
        packings: how values of fields that are unpacked are packed in this file.
        digests: of some values of each field (see `fingerprint.py`).
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
    """Fields over the rows of all files. A *chunk* is a range of rows of one file that are read together.

    Attributes:
        fields: as batches hold them.
        files: in the order in which their rows are counted.
        decoders: functions of the user's, by name of the field. Each rank has them itself: they are not sent.
        num_selected: rows that a loader takes of a part of a split; None where it takes all.
    """

    fields: tuple[Field, ...]
    files: tuple[StoredFile, ...]
    decoders: Mapping[str, Decode] = field(default_factory=dict, repr=False)
    num_selected: int | None = None

    def __len__(self) -> int:
        """Return the number of rows that the loader of this data set takes."""
        return self.num_rows if self.num_selected is None else self.num_selected

    @cached_property
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
