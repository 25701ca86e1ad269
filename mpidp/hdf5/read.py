"""Reading the rows of chunks, as batches hold them: the one path from bytes in a file to values.

Rows are decoded without HDF5 where `locate` found that they can be. Others are read by HDF5, which lets one thread in
at a time. Both ways give the same values.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from mpidp.errors import DataError, MpidpError
from mpidp.hdf5.dataset import DataSet, Rows
from mpidp.hdf5.decode import Decoder, retried
from mpidp.hdf5.field import Converter, Field, narrow_to_bfloat16
from mpidp.hdf5.files.file import open_apart
from mpidp.hdf5.files.types import HDF5_ERRORS, read_rows
from mpidp.hdf5.filters import DEFLATE, inflater
from mpidp.hdf5.order import Part, Split
from mpidp.hdf5.plan import IntArray, Piece

Array = npt.NDArray[Any]
Key = TypeVar("Key")
Value = TypeVar("Value")

CACHE_BYTES = 64 * 2**20
LARGE_ROW_BYTES = 64 * 2**10  # from here on a read of a single row is worth its cost
_SMALL_RANGE_BYTES = 64 * 2**10
_MOST_CUTS = 64


@dataclass(frozen=True)
class Selection:
    """The rows of a data set that are used: all, or one part of a split."""

    dataset: DataSet
    split: Split | None = None
    part: Part = "train"

    @property
    def chunk_rows(self) -> IntArray:
        """Number of selected rows in each chunk, int64."""
        return self.dataset.chunk_rows if self.split is None else self.split.counts(self.part)

    def offsets(self, piece: Piece) -> IntArray:
        """Return where the selected rows of `piece` lie in their chunk: ascending int64 offsets."""
        assert self.split is not None
        return self.split.rows(piece.chunk, self.part)[piece.start : piece.stop]


class RowReader:
    """Reads selected rows of chunks, for any number of threads; keeps up to `cache_bytes` of blocks it needs again."""

    def __init__(self, selection: Selection, cache_bytes: int = CACHE_BYTES) -> None:
        self.selection = selection
        self._dataset = dataset = selection.dataset
        self._heights = selection.chunk_rows
        self._cache_bytes = cache_bytes
        self._decoder = Decoder()
        self._plain = PlainReader(dataset)
        self._plain_lock = threading.Lock()
        self._converters = [
            [
                Converter(field, dataset.decoders.get(field.name), packing)
                for field, packing in zip(dataset.fields, file.packings, strict=True)
            ]
            for file in dataset.files
        ]
        # By file, field, and block; block -1 is a whole small field, which stays.
        self._cache: Cache[tuple[int, int, int], Array] = Cache(cache_bytes, lambda array: array.nbytes)
        self._held: dict[tuple[int, int], Array] = {}
        files, fields = range(len(dataset.files)), range(len(dataset.fields))
        self._small = [[_is_small(dataset, file, number, cache_bytes) for number in fields] for file in files]
        self._single = [reads_single_rows(dataset, file, cache_bytes) for file in files]
        self._spans = threading.local()

    def read(self, piece: Piece, into: Rows) -> None:
        """Fill `into` with the rows of `piece`; raises `DataError` naming file, dataset and rows."""
        if piece.start == piece.stop:
            return
        # The rest of a chunk that is cut between streams will be wanted too.
        is_cut = piece.stop - piece.start < self._heights[piece.chunk]
        if self.selection.split is not None:
            self._read_selected(piece, into, is_cut)
            return
        self._read_run(int(self._dataset.chunk_starts[piece.chunk]) + piece.start, into, is_cut)

    def read_field(self, file: int, number: int, start: int, stop: int, into: Array, is_cut: bool = False) -> None:
        """Fill `into` (stop - start, *shape) with rows [start, stop), at least one, of field `number` of a file.

        With `is_cut`, other rows of the same block will be asked for, so it is decoded once and kept if it fits.
        """
        if self._small[file][number]:
            into[...] = self._whole(file, number)[start:stop]
        elif self._keeps(file, number, is_cut):
            self._read_kept(file, number, start, stop, into)
        else:
            self._read_anew(file, number, start, stop, into)

    def reads_single_rows(self, chunk: int) -> bool:
        """Whether rows of a chunk may be read one by one at no cost but that of the reads."""
        file, _ = self._dataset.file_of(int(self._dataset.chunk_starts[chunk]))
        return self._single[file]

    def empty(self, count: int) -> Rows:
        """Return room for `count` rows."""
        return Rows.empty(self._dataset.fields, count)

    def close(self) -> None:
        """Close all files. Reading opens them again."""
        self._held.clear()
        self._decoder.close()
        with self._plain_lock:
            self._plain.close()

    def _read_run(self, first: int, into: Rows, is_cut: bool) -> None:
        """Fill `into` with rows from `first` on, counted over all files, straight from their place in the file."""
        count = len(into.numbers)
        into.numbers[:] = np.arange(first, first + count)
        file, start = self._dataset.file_of(first)
        for number, field in enumerate(self._dataset.fields):
            self.read_field(file, number, start, start + count, into.fields[field.name], is_cut)

    def _read_selected(self, piece: Piece, into: Rows, is_cut: bool) -> None:
        """Fill `into` with the selected rows of a piece: run by run, or by one read of the span they lie in."""
        rows = self._dataset.chunk_starts[piece.chunk] + self.selection.offsets(piece)
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        is_large = self._dataset.row_bytes >= LARGE_ROW_BYTES
        if not len(breaks) or (is_large and self.reads_single_rows(piece.chunk)):
            for a, b in pairwise([0, *breaks.tolist(), len(rows)]):
                self._read_run(int(rows[a]), into.view(a, b), is_cut)
            return
        span = self._span(int(rows[-1] - rows[0]) + 1)
        self._read_run(int(rows[0]), span, is_cut)
        into.take_from(span, rows - rows[0], np.arange(len(rows)))

    def _span(self, count: int) -> Rows:
        """Return room for `count` rows that is this thread's, used again by its next span."""
        span: Rows | None = getattr(self._spans, "rows", None)
        if span is None or len(span.numbers) < count:
            span = self._spans.rows = self.empty(count)
        return span.view(0, count)

    def _keeps(self, file: int, number: int, is_cut: bool) -> bool:
        """Whether a block is decoded once and kept: it is in several ranges and fits, or is cut, and small."""
        stored = self._dataset.files[file]
        storage = stored.storages[number]
        if storage is None or storage.is_raw:
            return False
        several = stored.range_rows % storage.block_rows != 0
        return (several and storage.block_bytes <= self._cache_bytes) or (
            is_cut and storage.block_bytes <= self._cache_bytes // _MOST_CUTS
        )

    def _whole(self, file: int, number: int) -> Array:
        """Return all rows of a small field of a file."""
        held = self._held.get((file, number))
        if held is None:
            make = partial(self._made, file, number, 0, self._dataset.files[file].num_rows)
            held = self._held[file, number] = self._cache.get((file, number, -1), make)
        return held

    def _read_kept(self, file: int, number: int, start: int, stop: int, into: Array) -> None:
        storage = self._dataset.files[file].storages[number]
        assert storage is not None
        for block in range(start // storage.block_rows, (stop - 1) // storage.block_rows + 1):
            begin = block * storage.block_rows
            end = begin + storage.block_height(block)
            values = self._cache.get((file, number, block), partial(self._made, file, number, begin, end))
            low, high = max(start, begin), min(stop, end)
            into[low - start : high - start] = values[low - begin : high - begin]

    def _made(self, file: int, number: int, start: int, stop: int) -> Array:
        field = self._dataset.fields[number]
        values = np.empty((stop - start, *field.shape), field.dtype)
        self._read_anew(file, number, start, stop, values)
        return values

    def _read_anew(self, file: int, number: int, start: int, stop: int, into: Array) -> None:
        """Read, decode and convert rows: without HDF5 where that can be."""
        storage, field = self._dataset.files[file].storages[number], self._dataset.fields[number]
        convert = self._converters[file][number]
        try:
            if storage is not None:
                in_place = field.is_direct and storage.dtype.isnative and into.flags.c_contiguous
                self._decoder.read(storage, start, stop, into, convert, in_place)
                return
            with self._plain_lock:
                values = self._plain.read(file, field, start, stop)
            convert(values, into)
        except (DataError, OSError) as error:
            place = f'{self._dataset.files[file].path}: dataset "{field.dataset}", rows {start} to {stop - 1}'
            raise DataError(f"{place}: {error}") from error


def reads_single_rows(dataset: DataSet, file: int, cache_bytes: int = CACHE_BYTES) -> bool:
    """Whether rows of a file may be read one by one at no cost but that of the reads: raw, or of fields held whole."""
    storages = dataset.files[file].storages
    return all(
        (storage is not None and storage.is_raw) or _is_small(dataset, file, number, cache_bytes)
        for number, storage in enumerate(storages)
    )


def _is_small(dataset: DataSet, file: int, number: int, cache_bytes: int) -> bool:
    """Whether a field is held whole, because a read a range would cost more than its few bytes."""
    row_bytes = dataset.fields[number].row_bytes
    fits = dataset.num_rows * row_bytes <= cache_bytes // 4
    return fits and dataset.files[file].range_rows * row_bytes <= _SMALL_RANGE_BYTES


class Cache(Generic[Key, Value]):
    """Keeps values of at most `most_bytes` in sum, those used last; for any number of threads."""

    def __init__(self, most_bytes: int, bytes_of: Callable[[Value], int]) -> None:
        self._most_bytes = most_bytes
        self._bytes_of = bytes_of
        self._kept: OrderedDict[Key, Future[Value]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return the value of `key`, which one thread makes while others wait. What `make` raises, all raise."""
        with self._lock:
            future = self._kept.get(key)
            mine = future is None
            if future is None:
                future = self._kept[key] = Future()
            self._kept.move_to_end(key)
        if mine:
            self._make(key, future, make)
        return future.result()

    def _make(self, key: Key, future: Future[Value], make: Callable[[], Value]) -> None:
        try:
            value = make()
        except BaseException as error:
            with self._lock:
                del self._kept[key]
            future.set_exception(error)
            return
        future.set_result(value)
        with self._lock:
            self._bytes += self._bytes_of(value)
            for oldest in list(self._kept):
                if self._bytes <= self._most_bytes:
                    return
                if self._kept[oldest].done():
                    self._bytes -= self._bytes_of(self._kept.pop(oldest).result())


def decoding(dataset: DataSet) -> str:
    """Return how the fields are decoded, in a few words."""
    if any(reason for file in dataset.files for reason in file.slow):
        return "partly by HDF5 itself"
    filters = {step for file in dataset.files for storage in file.storages if storage for step in storage.filters}
    if not filters:
        return "read as it is"
    names = sorted(inflater() if step.number == DEFLATE else step.name for step in filters)
    return f"decoded without HDF5 ({', '.join(dict.fromkeys(names))})"


def slow_paths(dataset: DataSet) -> list[str]:
    """Return a line for each dataset that only HDF5 can read, with the reason; one thread decodes it."""
    lines: dict[str, str] = {}
    for file in dataset.files:
        for field, reason in zip(dataset.fields, file.slow, strict=True):
            if reason:
                line = f'{file.path}: dataset "{field.dataset}" is read by HDF5, one thread at a time: {reason}'
                lines.setdefault(field.name, line)
    return list(lines.values())


_LEAST_CACHE_BYTES = 8 * 2**20
_MOST_CACHE_BYTES = 256 * 2**20


class PlainReader:
    """Reads rows of the files of a `DataSet`. At most `most_open` files are open at a time."""

    def __init__(self, dataset: DataSet, most_open: int = 16) -> None:
        self._dataset = dataset
        self._most_open = most_open
        self._open: OrderedDict[int, Any] = OrderedDict()
        # The datasets of the file read last. HDF5 caches chunks for as long as a dataset is open, and only those
        # of one file, so that the memory of the caches does not grow with the number of files.
        self._current = -1
        self._datasets: dict[str, Any] = {}
        # Two chunks: a stream may end inside a chunk, and the next stream then finds the rest decoded.
        largest = max(file.range_rows for file in dataset.files) * max(f.row_bytes for f in dataset.fields)
        self._cache_bytes = min(max(_LEAST_CACHE_BYTES, 2 * largest), _MOST_CACHE_BYTES)

    def read(self, file: int, field: Field, start: int, stop: int) -> npt.NDArray[Any]:
        """Return rows [start, stop) as stored: compounds with the field's member only, bfloat16 as bits in uint16."""
        try:
            values = retried(lambda: self._read(file, field, start, stop))
        except MpidpError:
            raise
        except HDF5_ERRORS as error:  # KeyError: the file was replaced by one without the dataset
            raise DataError(f"cannot be read; the file may be damaged. HDF5 says: {error}") from error
        if field.stored.kind == "c" and values.dtype.names and not (field.member or field.decoded):
            # Imaginary part first, as h5py gives such values where another reader has the file open.
            parts, values = values, np.empty(values.shape, field.stored)
            values.real, values.imag = parts["r"], parts["i"]
        return narrow_to_bfloat16(values) if field.stored_bfloat16 else values

    def close(self) -> None:
        """Close all files. Reading opens them again."""
        for file in list(self._open):
            self._close(file)

    def _read(self, file: int, field: Field, start: int, stop: int) -> npt.NDArray[Any]:
        try:
            if file != self._current:
                self._turn_to(file)
            return read_rows(self._datasets[field.name], field.member, field.axis, start, stop)
        except OSError:
            # A stale handle stays stale: the next attempt, if any, opens the file anew.
            self._close(file)
            raise

    def _turn_to(self, file: int) -> None:
        self._forget_current()
        if file not in self._open:
            while len(self._open) >= self._most_open:
                self._close(next(iter(self._open)))
            self._open[file] = open_apart(self._dataset.files[file].path, self._cache_bytes)
        self._open.move_to_end(file)
        self._datasets = {field.name: self._open[file][field.dataset] for field in self._dataset.fields}
        self._current = file

    def _close(self, file: int) -> None:
        if file == self._current:
            self._forget_current()
        if file in self._open:
            self._open.pop(file).close()

    def _forget_current(self) -> None:
        self._datasets = {}
        self._current = -1
