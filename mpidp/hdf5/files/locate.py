"""The places of a dataset's bytes on disk, or the reason why only HDF5 can read them.

Addresses are used only after values decoded from them were equal to those that HDF5 reads: a user block shifts
addresses, and filters and types may have variants that are not known here.
"""

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from mpidp.errors import DataError
from mpidp.hdf5.dataset import Filter, Storage
from mpidp.hdf5.decode import Decoder
from mpidp.hdf5.field import narrow_to_bfloat16
from mpidp.hdf5.files.file import unwritten
from mpidp.hdf5.files.types import is_complete, raw_block
from mpidp.hdf5.filters import BITSHUFFLE, NAMES, SHUFFLE, obstacle
from mpidp.hdf5.plan import IntArray, WordArray

_CHECK_BYTES = 4 * 2**20
# What a damaged shape of chunks may not ask for. HDF5 knew no larger chunks before version 2.
_MOST_CHUNK_BYTES = 2**32 - 1
MOST_CHUNKS = 2**26


def locate(dataset: Any, dtype: np.dtype[Any] | None, axis: int) -> Storage | str:
    """Return the storage of a dataset of `dtype` whose samples lie along `axis`, or why only HDF5 can read it."""
    plist = dataset.id.get_create_plist()
    fill_is_defined = plist.fill_value_defined() != h5py.h5d.FILL_VALUE_UNDEFINED
    if not fill_is_defined and unwritten(dataset):
        raise DataError(f"{_where(dataset)} has parts that were never written, and no fill value; write it again")
    if dtype is None or dtype.subdtype:
        return "its values are not single numbers"
    return _Locator(dataset, plist, dtype, axis, fill_is_defined).locate()


def filters_of(plist: Any) -> tuple[Filter, ...]:
    """Return the filters in a dataset's property list, in the order of writing."""
    steps = (plist.get_filter(number) for number in range(plist.get_nfilters()))
    return tuple(
        Filter(number, NAMES.get(number) or label.decode(errors="replace") or f"number {number}", tuple(values))
        for number, _, values, label in steps
    )


def _where(dataset: Any) -> str:
    return f'{dataset.file.filename}: dataset "{dataset.name}"'


class _Locator:
    """One open dataset; what h5py asks the file for anew each time is asked for once."""

    def __init__(self, dataset: Any, plist: Any, dtype: np.dtype[Any], axis: int, fill_is_defined: bool) -> None:
        self.dataset, self.plist, self.dtype, self.axis = dataset, plist, dtype, axis
        self.fill_is_defined = fill_is_defined
        self.shape, self.chunks, self.home = dataset.shape, dataset.chunks, dataset.file
        self.path = self.home.filename
        self.kind = dataset.id.get_type()
        self.filters = filters_of(plist)
        # Whether it holds bfloat16, whose bits `dtype` stands for.
        self.is_bfloat16 = dtype.kind == "u" and isinstance(self.kind, h5py.h5t.TypeFloatID)

    def locate(self) -> Storage | str:
        reason = self._type_obstacle() or obstacle(self.filters)
        if reason:
            return reason
        self._check_element_size()
        found = self._chunked() if self.chunks else self._unchunked()
        return found if isinstance(found, str) else self._verified(found)

    def _type_obstacle(self) -> str:
        kind, dtype = self.kind, self.dtype
        if not is_complete(kind, dtype):
            return "its records have members that vary in length or that NumPy does not know"
        if kind.get_size() != dtype.itemsize:
            return f"its type takes {kind.get_size()} bytes on disk, {dtype.itemsize} in memory"
        if isinstance(kind, h5py.h5t.TypeIntegerID) and kind.get_precision() != 8 * kind.get_size():
            return "its integers do not use all of their bits"
        if self.is_bfloat16:
            return ""
        # Strings padded with spaces, a complex number whose imaginary part comes first, and what else HDF5 converts
        # while it reads although the sizes agree.
        same = kind == h5py.h5t.py_create(self.dataset.dtype, logical=True)
        return "" if same else "HDF5 converts its values while it reads them"

    def _check_element_size(self) -> None:
        """Raise `DataError` where a filter has another element size than the dataset: undoing it might not end."""
        for step in self.filters:
            place = {SHUFFLE: 0, BITSHUFFLE: 2}.get(step.number)
            if place is not None and step.values[place : place + 1] != (self.dtype.itemsize,):
                found = ", ".join(map(str, step.values[place : place + 1])) or "no size"
                raise DataError(
                    f"{_where(self.dataset)}: filter {step.name} was written for elements of {found} bytes, but they "
                    f"have {self.dtype.itemsize}; the file is damaged: write it again"
                )

    def _chunked(self) -> Storage:
        grid = tuple(-(-length // step) for length, step in zip(self.shape, self.chunks, strict=True))
        count, chunk_bytes = math.prod(grid), math.prod(self.chunks) * self.dtype.itemsize
        if count > MOST_CHUNKS or chunk_bytes > _MOST_CHUNK_BYTES:
            raise DataError(
                f"{_where(self.dataset)} has {count} chunks of {chunk_bytes} bytes; at most {MOST_CHUNKS} can be read, "
                f"of {_MOST_CHUNK_BYTES} bytes. Unless the file is damaged, write it with others (mpidp data convert)"
            )
        places, facts = _chunk_table(self.dataset, count)
        self._check_chunks(places, facts, chunk_bytes)
        table = np.full((count, 3), (-1, 0, 0), dtype=np.int64)
        if len(places):
            table[self._checked_cells(places, grid)] = facts
        by_block = np.moveaxis(table.reshape(*grid, 3), self.axis, 0).reshape(grid[self.axis], -1, 3)
        masks = by_block[:, :, 2].astype(np.uint32)
        return Storage(
            path=self.path,
            dtype=self.dtype,
            shape=self.shape,
            axis=self.axis,
            chunk=self.chunks,
            chunked=True,
            filters=self.filters,
            offsets=np.ascontiguousarray(by_block[:, :, 0]),
            sizes=np.ascontiguousarray(by_block[:, :, 1]),
            masks=masks if masks.any() else None,
            fill=self._fill(),
        )

    def _check_chunks(self, places: IntArray, facts: WordArray, chunk_bytes: int) -> None:
        """Raise `DataError` for a chunk that does not lie within the file, or has not the size it must have."""
        file_bytes = np.uint64(self.home.id.get_filesize())
        offsets, sizes, masks = facts.T
        within = (offsets <= file_bytes) & (sizes <= file_bytes - np.minimum(offsets, file_bytes))
        every = np.uint64((1 << len(self.filters)) - 1)
        sound = within & ((masks & every != every) | (sizes == chunk_bytes))  # what no filter changed has its size
        if sound.all():
            return
        first = int(np.argmin(sound))
        raise DataError(
            f"{_where(self.dataset)}: the chunk at {tuple(places[first].tolist())} is said to be {sizes[first]} bytes "
            f"at byte {offsets[first]} of a file of {file_bytes} bytes; the file is damaged: write it again"
        )

    def _checked_cells(self, places: IntArray, grid: tuple[int, ...]) -> IntArray:
        """Return the number of each chunk in the grid; raises `DataError` unless there is one chunk at each place."""
        # Older files have no checksum of the index, and HDF5 reads fill values where a key of it is damaged.
        cells, rest = np.divmod(places, np.array(self.chunks))
        inside = bool((rest == 0).all() and (cells >= 0).all() and (cells < np.array(grid)).all())
        numbers = np.ravel_multi_index(tuple(cells.T), grid) if inside else np.empty(0, np.int64)
        if len(np.unique(numbers)) < len(places):
            raise self._damaged_index()
        return numbers.astype(np.int64, copy=False)

    def _fill(self) -> bytes:
        if not self.fill_is_defined:
            return b""  # nothing reads as it: every chunk was written
        if self.is_bfloat16:
            return narrow_to_bfloat16(np.array([self.dataset.fillvalue])).astype(self.dtype).tobytes()
        return np.asarray(self.dataset.fillvalue, dtype=self.dtype).tobytes()

    def _unchunked(self) -> Storage | str:
        if self.axis != 0:
            return "without chunks, rows can only be read along the first axis"
        inline, offset = b"", self.dataset.id.get_offset()
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        room = self.home.id.get_filesize() - (offset or 0)
        if num_bytes > room:
            raise DataError(
                f"{_where(self.dataset)} needs {num_bytes} bytes, and the file has {max(0, room)} where they would "
                "lie; it is damaged: write it again"
            )
        if self.plist.get_layout() == h5py.h5d.COMPACT:
            inline, offset = raw_block(self.dataset, (0,) * len(self.shape), self.shape).tobytes(), 0
        if offset is None:
            return "its bytes have no place in this file"
        return Storage(
            path=self.path,
            dtype=self.dtype,
            shape=self.shape,
            axis=0,
            chunk=(1, *self.shape[1:]),
            chunked=False,
            filters=(),
            offsets=np.array([[offset]], np.int64),
            sizes=np.array([[self.dataset.id.get_storage_size()]], np.int64),
            masks=None,
            inline=inline,
        )

    def _verified(self, storage: Storage) -> Storage | str:
        """Return the storage with the offsets at which some blocks equal what HDF5 reads, or what differed."""
        if storage.inline:
            return storage
        user_block = self.home.userblock_size
        moved = (
            np.where(storage.offsets < 0, storage.offsets, storage.offsets + base)
            for base in dict.fromkeys((0, user_block))
        )
        problem, equal = "", [replace(storage, offsets=offsets) for offsets in moved]
        with closing(Decoder()) as decoder:
            for start, stop in _samples(storage):
                expected = self._read_by_hdf5(start, stop)
                for candidate in list(equal):
                    difference = _difference(candidate, start, stop, expected, decoder)
                    if difference:
                        problem = difference
                        equal.remove(candidate)
                if not equal:
                    break
        if len(equal) > 1:
            return f"its values do not tell whether addresses count from behind the user block of {user_block} bytes"
        if not equal and storage.chunked:
            self._check_lookup(storage)
        return equal[0] if equal else f"bytes read without HDF5 differ from its own reading ({problem})"

    def _read_by_hdf5(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return rows as opaque values, so that HDF5 converts nothing and every bit is compared."""
        begin, shape = [0] * len(self.shape), list(self.shape)
        begin[self.axis], shape[self.axis] = start, stop - start
        try:
            return np.moveaxis(raw_block(self.dataset, tuple(begin), tuple(shape)), self.axis, 0)
        except OSError as error:
            place = f"{_where(self.dataset)}, rows {start} to {stop - 1}"
            raise DataError(f"{place} cannot be read; the file may be damaged. HDF5 says: {error}") from error

    def _check_lookup(self, storage: Storage) -> None:
        """Raise `DataError` where HDF5 does not find a chunk that its index lists: then what it reads is wrong."""
        for block in range(storage.grid[storage.axis]):
            for tile, (within_row, _) in enumerate(storage.tiles()):
                corner = [part.start for part in within_row]
                corner.insert(storage.axis, block * storage.block_rows)
                if storage.offsets[block, tile] < 0:
                    continue
                try:
                    self.dataset.id.read_direct_chunk(tuple(corner))
                except (OSError, RuntimeError, ValueError) as error:
                    raise self._damaged_index() from error

    def _damaged_index(self) -> DataError:
        return DataError(
            f"{_where(self.dataset)}: its index of chunks is damaged, and HDF5 would read "
            "chunks that it does not find as fill values; write it again"
        )


def _chunk_table(dataset: Any, most: int) -> tuple[IntArray, WordArray]:
    """Return the first element (n, axes) and (offset, size, mask) (n, 3) of each chunk that was written.

    Only a damaged index lists more than `most` chunks. `chunk_iter` visits the index once, in 0.05 s for 32,000 chunks;
    asking for one chunk after another takes 74 s.
    """
    places: list[tuple[int, ...]] = []
    facts: list[tuple[int, int, int]] = []

    def note(info: Any) -> bool | None:
        places.append(info.chunk_offset)
        facts.append((info.byte_offset, info.size, info.filter_mask))
        return True if len(places) > most else None

    dataset.id.chunk_iter(note)
    table = np.array(facts, np.uint64).reshape(len(facts), 3)
    return np.array(places, np.uint64).astype(np.int64).reshape(len(places), len(dataset.shape)), table


def _difference(storage: Storage, start: int, stop: int, expected: npt.NDArray[Any], decoder: Decoder) -> str:
    """Return in what rows [start, stop), decoded from their place, differ from those expected, or ""."""
    # As opaque values: copying records would leave out what pads them.
    opaque = replace(storage, dtype=np.dtype((np.void, storage.dtype.itemsize)))
    found = np.empty(expected.shape, opaque.dtype)
    try:
        decoder.read(opaque, start, stop, found, lambda values, into: np.copyto(into, values), in_place=True)
    except (DataError, OSError) as error:
        return str(error)
    return "" if found.tobytes() == expected.tobytes() else f"rows {start} to {stop - 1}"


def _samples(storage: Storage) -> Iterator[tuple[int, int]]:
    """Yield the rows to compare: of the first, the middle and the last block, at most some mebibytes of each."""
    blocks = -(-storage.num_rows // storage.block_rows)
    row_bytes = max(1, storage.block_bytes // storage.block_rows)
    for block in sorted({0, blocks // 2, blocks - 1}):
        start = block * storage.block_rows
        yield start, start + max(1, min(storage.block_height(block), _CHECK_BYTES // row_bytes))
