"""Enters: a file, a field, a range of rows. Leaves: their values as batches hold them.

Rows are decoded without HDF5 where `locate` found that they can be, and read by HDF5, one thread at a time,
where not. Both ways give the same values.
"""

import os
import threading
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidp.errors import DataError
from mpidp.hdf5.decode.cache import Cache
from mpidp.hdf5.decode.convert import Converter
from mpidp.hdf5.decode.decode import Decoder
from mpidp.hdf5.decode.raw_file import RawFiles
from mpidp.hdf5.decode.storage import Storage
from mpidp.hdf5.files.dataset import DataSet
from mpidp.hdf5.rows.reader import Reader

Array = npt.NDArray[Any]

CACHE_BYTES = 64 * 2**20
LARGE_ROW_BYTES = 64 * 2**10  # from here on a read of a single row is worth its cost
_SMALL_RANGE_BYTES = 64 * 2**10
_MOST_CUTS = 64


class RowReader:
    """Reads rows of a `DataSet`, for any number of threads of the process that made it.

    cache_bytes: decoded blocks that are taller than the ranges in which rows are read are kept up to this size.
    """

    def __init__(self, dataset: DataSet, cache_bytes: int = CACHE_BYTES) -> None:
        self._dataset = dataset
        self._cache_bytes = cache_bytes
        self._files = RawFiles()
        self._decoder = Decoder(self._files)
        self._by_hdf5 = Reader(dataset)
        self._hdf5_lock = threading.Lock()
        self._converters = [
            [
                Converter(field, dataset.decoders.get(field.name), packing)
                for field, packing in zip(dataset.fields, file.packings, strict=True)
            ]
            for file in dataset.files
        ]
        self._cache: Cache[tuple[int, int, int], Array] = Cache(cache_bytes, lambda array: array.nbytes)
        self._held: dict[tuple[int, int], Array] = {}
        self._small_lock = threading.Lock()
        self._ways = [
            [self._way(file, number) for number in range(len(dataset.fields))] for file in range(len(dataset.files))
        ]
        self._pid = os.getpid()

    def read(self, file: int, number: int, start: int, stop: int, into: Array, is_cut: bool = False) -> None:
        """Fill `into` (stop - start, *shape) with rows [start, stop), at least one, of field `number` of a file.

        With `is_cut`, other rows of the same block will be asked for, so it is decoded once and kept if it fits.

        Raises `DataError` naming file, dataset and rows when they cannot be read, when a value does not fit,
        and in a process forked from the one that made this reader.
        """
        if os.getpid() != self._pid:
            raise DataError(
                f"this reader was made in process {self._pid} and is used in its fork {os.getpid()}; files and "
                "threads shared over a fork give wrong data: read in threads, or make the loader in the child"
            )
        held = self._held.get((file, number))
        if held is None and self._ways[file][number] == "small":
            held = self._small(file, number)
        if held is None:
            self._read_named(file, number, start, stop, into, is_cut)
        else:
            into[...] = held[start:stop]

    def _read_named(self, file: int, number: int, start: int, stop: int, into: Array, is_cut: bool = False) -> None:
        try:
            self._read(file, number, start, stop, into, is_cut)
        except (DataError, OSError) as error:
            path, name = self._dataset.files[file].path, self._dataset.fields[number].dataset
            raise DataError(f'{path}: dataset "{name}", rows {start} to {stop - 1}: {error}') from error

    def _read(self, file: int, number: int, start: int, stop: int, into: Array, is_cut: bool) -> None:
        storage = self._dataset.files[file].storages[number]
        if storage is None:
            self._read_by_hdf5(file, number, start, stop, into)
        elif self._ways[file][number] == "kept" or (is_cut and self._is_worth_keeping(storage)):
            self._read_kept(file, number, storage, start, stop, into)
        else:
            self._decode(file, number, storage, start, stop, into)

    def close(self) -> None:
        """Close all files. Reading opens them again."""
        self._held.clear()
        self._files.close()
        with self._hdf5_lock:
            self._by_hdf5.close()

    def _is_worth_keeping(self, storage: Storage) -> bool:
        """Whether a block that is cut between lanes is decoded, and small beside what may be kept."""
        return not storage.is_raw and storage.block_bytes <= self._cache_bytes // _MOST_CUTS

    def _way(self, file: int, number: int) -> str:
        small = _is_small(self._dataset, file, number, self._cache_bytes)
        return "small" if small else "kept" if self._serves_several(file, number) else "direct"

    def _serves_several(self, file: int, number: int) -> bool:
        """Whether a block is in several ranges, so that it is decoded once and kept, if it fits."""
        stored = self._dataset.files[file]
        storage = stored.storages[number]
        if storage is None or storage.is_raw or storage.block_bytes > self._cache_bytes:
            return False
        return stored.range_rows % storage.block_rows != 0

    def _read_by_hdf5(self, file: int, number: int, start: int, stop: int, into: Array) -> None:
        with self._hdf5_lock:
            values = self._by_hdf5.read(file, self._dataset.fields[number], start, stop)
        self._converters[file][number](values, into)

    def _small(self, file: int, number: int) -> Array:
        """Return all rows of a small field of a file."""
        with self._small_lock:
            if (file, number) not in self._held:
                stored, field = self._dataset.files[file], self._dataset.fields[number]
                values = np.empty((stored.num_rows, *field.shape), field.dtype)
                self._read_named(file, number, 0, stored.num_rows, values)
                self._held[file, number] = values
            return self._held[file, number]

    def _read_kept(self, file: int, number: int, storage: Storage, start: int, stop: int, into: Array) -> None:
        for block in range(start // storage.block_rows, (stop - 1) // storage.block_rows + 1):
            begin = block * storage.block_rows
            end = begin + storage.block_height(block)
            values = self._cache.get((file, number, block), partial(self._made, file, number, storage, begin, end))
            low, high = max(start, begin), min(stop, end)
            into[low - start : high - start] = values[low - begin : high - begin]

    def _made(self, file: int, number: int, storage: Storage, start: int, stop: int) -> Array:
        field = self._dataset.fields[number]
        values = np.empty((stop - start, *field.shape), field.dtype)
        self._decode(file, number, storage, start, stop, values)
        return values

    def _decode(self, file: int, number: int, storage: Storage, start: int, stop: int, into: Array) -> None:
        direct = self._dataset.fields[number].is_direct and storage.dtype.isnative and into.flags.c_contiguous
        room = into.reshape(-1).view(np.uint8) if direct else None
        for part in self._decoder.rows(storage, start, stop, room):
            if not part.in_place:
                begin = part.start - start
                self._converters[file][number](part.values, into[begin : begin + len(part.values)])


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
