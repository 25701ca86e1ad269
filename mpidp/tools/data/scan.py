"""The scan of a dataset's values, chunk by chunk: one rank's share of `mpidp data verify`.

Every chunk is decoded by HDF5 itself, which checks the checksums of fletcher32 and of the compressors.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidp.hdf5.files.types import HDF5_ERRORS, raw_block
from mpidp.hdf5.plan import IntArray

# So much is dealt to a rank at a time, and read at a time where there are no chunks.
BLOCK_BYTES = 8 << 20
_INT64_MOST = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        kind: "unreadable", "missing", "non-finite", "uint64" or "dangling".
        file, dataset: where; the dataset is "" for the file as a whole.
        rows: first and last row, None where it is not about rows.
        chunk: its place among the chunks, on each axis; None without chunks.
        text: what was found.
    """

    kind: str
    file: str
    dataset: str
    text: str
    rows: tuple[int, int] | None = None
    chunk: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Work:
    """A dataset as one rank described it to all: its shape, the grid of pieces to read, and which are not there.

    `piece` is a chunk's shape, or where there are no chunks a range of rows of about 8 MiB. Pieces are numbered with
    the last axis fastest. `missing` are the numbers (int64, ascending) of chunks never written; with `may_miss`
    that is no finding. `unlooked` says of which type its values are if they are decoded only.
    """

    name: str
    shape: tuple[int, ...]
    piece: tuple[int, ...]
    is_chunked: bool
    row_major_bytes: int
    missing: IntArray
    may_miss: bool = False
    unlooked: str = ""

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of pieces on each axis."""
        return tuple(-(-length // height) for length, height in zip(self.shape, self.piece, strict=True))

    @property
    def num_pieces(self) -> int:
        """All pieces."""
        return math.prod(self.grid)

    @property
    def piece_bytes(self) -> int:
        """Bytes of a whole piece in memory."""
        return math.prod(self.piece) * self.row_major_bytes

    def is_missing(self, number: int) -> bool:
        """Whether a piece was never written."""
        place = int(np.searchsorted(self.missing, number))
        return place < len(self.missing) and int(self.missing[place]) == number

    def place(self, number: int) -> tuple[int, ...]:
        """The place of a piece in the grid."""
        return tuple(int(index) for index in np.unravel_index(number, self.grid)) if self.grid else ()

    def slices(self, number: int) -> tuple[slice, ...]:
        """What a piece covers."""
        bounds = zip(self.place(number), self.piece, self.shape, strict=True)
        return tuple(slice(index * height, min((index + 1) * height, length)) for index, height, length in bounds)

    def blocks(self) -> Iterator[range]:
        """Yield the numbers of the pieces of each block, which is read by one rank."""
        size = max(1, BLOCK_BYTES // max(1, self.piece_bytes))
        for start in range(0, self.num_pieces, size):
            yield range(start, min(start + size, self.num_pieces))


@dataclass
class Bad:
    """Values of one dataset, or one member of it, that should not be there; `first` is the place of the first."""

    count: int = 0
    first: tuple[int, ...] | None = None
    example: str = ""

    def add(self, count: int, first: tuple[int, ...], example: str) -> None:
        """Count more of them."""
        self.count += count
        if self.first is None or first < self.first:
            self.first, self.example = first, example


@dataclass
class Scan:
    """What a rank has found so far. At most `limit` unreadable pieces are named; all are counted."""

    limit: int
    findings: list[Finding] = field(default_factory=list)
    unreadable: int = 0
    read_bytes: int = 0
    bad: dict[tuple[str, str, str], Bad] = field(default_factory=dict)

    def read(self, file: str, dataset: Any, work: Work, number: int) -> None:
        """Read one piece and look at its values; a piece that HDF5 cannot read is a finding."""
        slices = work.slices(number)
        try:
            values = self._values(dataset, slices)
        except HDF5_ERRORS as error:
            self.unreadable += 1
            if len(self.findings) < self.limit:
                self.findings.append(_unreadable(file, dataset, work, number, error))
            return
        self.read_bytes += values.nbytes
        origin = tuple(part.start for part in slices)
        for member, part in _numbers(values):
            self._look(work.name, member, part, origin)

    def _values(self, dataset: Any, slices: tuple[slice, ...]) -> npt.NDArray[Any]:
        try:
            dtype = dataset.dtype
        except HDF5_ERRORS:  # NumPy has no such type; decoding checks the checksums all the same
            shape = tuple(part.stop - part.start for part in slices)
            return raw_block(dataset, tuple(part.start for part in slices), shape)
        return np.asarray(dataset[slices] if slices else dataset[()], dtype if dtype.hasobject else None)

    def _look(self, name: str, member: str, values: npt.NDArray[Any], origin: tuple[int, ...]) -> None:
        if values.dtype.kind in "fc":
            kind, wrong = "non-finite", ~np.isfinite(values)
        elif values.dtype.kind == "u" and values.dtype.itemsize == 8:
            kind, wrong = "uint64", values > _INT64_MOST
        else:
            return
        if count := int(np.count_nonzero(wrong)):
            place = tuple(int(index) for index in np.unravel_index(int(np.argmax(wrong)), wrong.shape))
            # A member may be an array and have axes of its own, which begin at 0.
            start = origin + (0,) * (len(place) - len(origin))
            first = tuple(a + b for a, b in zip(start, place, strict=True))
            self.bad.setdefault((kind, name, member), Bad()).add(count, first, str(values[place]))


def missing_pieces(dataset: Any) -> IntArray:
    """Return the numbers (int64, ascending) of the chunks of an open dataset that were never written."""
    grid = tuple(-(-length // height) for length, height in zip(dataset.shape, dataset.chunks, strict=True))
    total = math.prod(grid)
    if dataset.id.get_num_chunks() == total or total == 0:
        return np.zeros(0, np.int64)
    there = np.zeros(total, np.bool_)

    def mark(info: Any) -> None:
        place = tuple(offset // height for offset, height in zip(info.chunk_offset, dataset.chunks, strict=True))
        if all(index < length for index, length in zip(place, grid, strict=True)):  # a shrunk dataset may keep others
            there[np.ravel_multi_index(place, grid)] = True

    dataset.id.chunk_iter(mark)
    return np.flatnonzero(~there)


def describe_work(dataset: Any, name: str) -> Work:
    """Cut an open dataset into pieces."""
    shape, itemsize = dataset.shape, dataset.id.get_type().get_size()
    if dataset.chunks:
        return Work(name, shape, dataset.chunks, True, itemsize, missing_pieces(dataset))
    row_bytes = max(1, math.prod(shape[1:]) * itemsize)
    piece = (max(1, BLOCK_BYTES // row_bytes), *(max(1, length) for length in shape[1:])) if shape else ()
    is_unwritten = not (dataset.is_virtual or dataset.external or dataset.id.get_storage_size())
    work = Work(name, shape, piece, False, itemsize, np.zeros(0, np.int64))
    is_missing = is_unwritten and dataset.size
    return replace(work, missing=np.arange(work.num_pieces, dtype=np.int64)) if is_missing else work


def _numbers(values: npt.NDArray[Any]) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield the plain arrays in an array: itself, or each member of a compound, by name."""
    if values.dtype.names is None:
        yield "", values
        return
    for name in values.dtype.names:
        for inner, part in _numbers(values[name]):
            yield f"{name}.{inner}".rstrip("."), part


def _unreadable(file: str, dataset: Any, work: Work, number: int, error: Exception) -> Finding:
    slices = work.slices(number)
    rows = (slices[0].start, slices[0].stop - 1) if slices else None
    text = f"cannot be read: {error}"
    if work.is_chunked:
        with suppress(*HDF5_ERRORS):
            info = dataset.id.get_chunk_info_by_coord(tuple(part.start for part in slices))
            text = f"cannot be decoded ({info.size} bytes at {info.byte_offset} of the file): {error}"
    return Finding("unreadable", file, work.name, text, rows, work.place(number) if work.is_chunked else None)
