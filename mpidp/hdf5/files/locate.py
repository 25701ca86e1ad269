"""Where the bytes of a dataset lie on disk, or why only HDF5 can read them.

Addresses are not trusted before values decoded from them equal those that HDF5 reads: a user block shifts
them, and a filter or a type may hold a surprise.
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
from mpidp.hdf5.convert_values import narrow_to_bfloat16
from mpidp.hdf5.dataset import Filter, Storage
from mpidp.hdf5.decode import Decoder
from mpidp.hdf5.files.file import unwritten
from mpidp.hdf5.files.types import is_complete
from mpidp.hdf5.filters import BITSHUFFLE, NAMES, SHUFFLE, obstacle
from mpidp.hdf5.order.keyed import IntArray, WordArray

_CHECK_BYTES = 4 * 2**20
# What a damaged shape of chunks may not ask for. HDF5 knew no larger chunks before version 2.
_MOST_CHUNK_BYTES = 2**32 - 1
MOST_CHUNKS = 2**26


def locate(dataset: Any, dtype: np.dtype[Any] | None, axis: int) -> Storage | str:
    """Return the storage of a dataset whose values are `dtype` on disk, or why it cannot be read without HDF5.

    `axis`, at least 0, counts the samples.
    """
    if not _fill_is_defined(dataset) and unwritten(dataset):
        raise DataError(f"{_where(dataset)} has parts that were never written, and no fill value; write it again")
    if dtype is None or dtype.subdtype:
        return "its values are not single numbers"
    filters = filters_of(dataset)
    reason = _type_obstacle(dataset, dtype) or obstacle(filters)
    if reason:
        return reason
    _check_element_size(dataset, filters, dtype)
    found = _chunked(dataset, dtype, axis, filters) if dataset.chunks else _unchunked(dataset, dtype, axis)
    if isinstance(found, str):
        return found
    return _verified(dataset, found)


def filters_of(dataset: Any) -> tuple[Filter, ...]:
    """Return the filters of a dataset, in the order of writing."""
    plist = dataset.id.get_create_plist()
    steps = (plist.get_filter(number) for number in range(plist.get_nfilters()))
    return tuple(
        Filter(number, NAMES.get(number) or label.decode(errors="replace") or f"number {number}", tuple(values))
        for number, _, values, label in steps
    )


def _where(dataset: Any) -> str:
    return f'{dataset.file.filename}: dataset "{dataset.name}"'


def _check_element_size(dataset: Any, filters: tuple[Filter, ...], dtype: np.dtype[Any]) -> None:
    """Raise `DataError` where a filter was told of elements of another size: a loop over them might not end."""
    for step in filters:
        place = {SHUFFLE: 0, BITSHUFFLE: 2}.get(step.number)
        if place is not None and step.values[place : place + 1] != (dtype.itemsize,):
            found = ", ".join(map(str, step.values[place : place + 1])) or "no size"
            raise DataError(
                f"{_where(dataset)}: filter {step.name} was told of elements of {found} bytes, and they have "
                f"{dtype.itemsize}; the file is damaged: write it again"
            )


def _type_obstacle(dataset: Any, dtype: np.dtype[Any]) -> str:
    kind = dataset.id.get_type()
    if not is_complete(kind, dtype):
        return "its records have members that vary in length or that NumPy does not know"
    if kind.get_size() != dtype.itemsize:
        return f"its type takes {kind.get_size()} bytes on disk, {dtype.itemsize} in memory"
    if isinstance(kind, h5py.h5t.TypeIntegerID) and kind.get_precision() != 8 * kind.get_size():
        return "its integers do not use all of their bits"
    if _is_bfloat16(dataset, dtype):
        return ""
    # Strings padded with spaces, a complex number whose imaginary part comes first, and what else HDF5 converts
    # while it reads although the sizes agree.
    same = kind == h5py.h5t.py_create(dataset.dtype, logical=True)
    return "" if same else "HDF5 converts its values while it reads them"


def _chunked(dataset: Any, dtype: np.dtype[Any], axis: int, filters: tuple[Filter, ...]) -> Storage:
    grid = tuple(-(-length // step) for length, step in zip(dataset.shape, dataset.chunks, strict=True))
    count, chunk_bytes = math.prod(grid), math.prod(dataset.chunks) * dtype.itemsize
    if count > MOST_CHUNKS or chunk_bytes > _MOST_CHUNK_BYTES:
        raise DataError(
            f"{_where(dataset)} has {count} chunks of {chunk_bytes} bytes; at most {MOST_CHUNKS} can be read, of "
            f"{_MOST_CHUNK_BYTES} bytes. Unless the file is damaged, write it with others (mpidp data convert)"
        )
    places, facts = _chunk_table(dataset)
    _check_chunks(dataset, places, facts, chunk_bytes, filters)
    table = np.full((count, 3), (-1, 0, 0), dtype=np.int64)
    if len(places):
        table[_checked_cells(dataset, places, grid)] = facts
    by_block = np.moveaxis(table.reshape(*grid, 3), axis, 0).reshape(grid[axis], -1, 3)
    masks = by_block[:, :, 2].astype(np.uint32)
    return Storage(
        path=dataset.file.filename,
        dtype=dtype,
        shape=dataset.shape,
        axis=axis,
        chunk=dataset.chunks,
        chunked=True,
        filters=filters,
        offsets=np.ascontiguousarray(by_block[:, :, 0]),
        sizes=np.ascontiguousarray(by_block[:, :, 1]),
        masks=masks if masks.any() else None,
        fill=_fill(dataset, dtype),
    )


def _check_chunks(
    dataset: Any, places: IntArray, facts: WordArray, chunk_bytes: int, filters: tuple[Filter, ...]
) -> None:
    """Raise `DataError` for a chunk that does not lie within the file, or has not the size it must have."""
    file_bytes = np.uint64(dataset.file.id.get_filesize())
    offsets, sizes, masks = facts.T
    within = (offsets <= file_bytes) & (sizes <= file_bytes - np.minimum(offsets, file_bytes))
    every = np.uint64((1 << len(filters)) - 1)
    sound = within & ((masks & every != every) | (sizes == chunk_bytes))  # what no filter changed has its size
    if sound.all():
        return
    first = int(np.argmin(sound))
    raise DataError(
        f"{_where(dataset)}: the chunk at {tuple(places[first].tolist())} is said to be {sizes[first]} bytes at byte "
        f"{offsets[first]} of a file of {file_bytes} bytes; the file is damaged: write it again"
    )


def _checked_cells(dataset: Any, places: IntArray, grid: tuple[int, ...]) -> IntArray:
    """Return the number of each chunk in the grid; raises `DataError` unless there is one chunk at each place.

    Older files have no checksum of the index, and HDF5 finds nothing, that is fill values, where a key is damaged.
    """
    cells, rest = np.divmod(places, np.array(dataset.chunks))
    inside = bool((rest == 0).all() and (cells >= 0).all() and (cells < np.array(grid)).all())
    numbers = np.ravel_multi_index(tuple(cells.T), grid) if inside else np.empty(0, np.int64)
    if len(np.unique(numbers)) < len(places):
        raise _damaged_index(dataset)
    return numbers.astype(np.int64, copy=False)


def _check_lookup(dataset: Any, storage: Storage) -> None:
    """Raise `DataError` where HDF5 does not find a chunk that its index lists: then its own reading is wrong.

    Reads all chunks, which is what so strange a dataset is worth.
    """
    for block in range(storage.grid[storage.axis]):
        for tile, (within_row, _) in enumerate(storage.tiles()):
            corner = [part.start for part in within_row]
            corner.insert(storage.axis, block * storage.block_rows)
            if storage.offsets[block, tile] < 0:
                continue
            try:
                dataset.id.read_direct_chunk(tuple(corner))
            except (OSError, RuntimeError, ValueError) as error:
                raise _damaged_index(dataset) from error


def _damaged_index(dataset: Any) -> DataError:
    return DataError(
        f"{_where(dataset)}: its index of chunks is damaged, and HDF5 would read "
        "chunks that it does not find as fill values; write it again"
    )


def _fill_is_defined(dataset: Any) -> bool:
    return bool(dataset.id.get_create_plist().fill_value_defined() != h5py.h5d.FILL_VALUE_UNDEFINED)


def _fill(dataset: Any, dtype: np.dtype[Any]) -> bytes:
    if not _fill_is_defined(dataset):
        return b""  # nothing reads as it: every chunk was written
    if _is_bfloat16(dataset, dtype):
        return narrow_to_bfloat16(np.array([dataset.fillvalue])).astype(dtype).tobytes()
    return np.asarray(dataset.fillvalue, dtype=dtype).tobytes()


def _is_bfloat16(dataset: Any, dtype: np.dtype[Any]) -> bool:
    """Whether the dataset holds bfloat16, whose bits `dtype` stands for."""
    return dtype.kind == "u" and isinstance(dataset.id.get_type(), h5py.h5t.TypeFloatID)


def _chunk_table(dataset: Any) -> tuple[IntArray, WordArray]:
    """Return the first element (n, axes) and (offset, size, mask) (n, 3) of each chunk that was written.

    Ends once there are more than fit the dataset, which only a damaged index lists.

    `chunk_iter` visits the index once. Asking for chunk after chunk searches it anew each time: 74 s where
    32,000 chunks take 0.05 s so.
    """
    places: list[tuple[int, ...]] = []
    facts: list[tuple[int, int, int]] = []

    most = math.prod(-(-length // step) for length, step in zip(dataset.shape, dataset.chunks, strict=True))

    def note(info: Any) -> bool | None:
        places.append(info.chunk_offset)
        facts.append((info.byte_offset, info.size, info.filter_mask))
        return True if len(places) > most else None

    dataset.id.chunk_iter(note)
    table = np.array(facts, np.uint64).reshape(len(facts), 3)
    return np.array(places, np.uint64).astype(np.int64).reshape(len(places), len(dataset.shape)), table


def _unchunked(dataset: Any, dtype: np.dtype[Any], axis: int) -> Storage | str:
    if axis != 0:
        return "without chunks, rows can only be read along the first axis"
    inline = b""
    offset = dataset.id.get_offset()
    num_bytes = math.prod(dataset.shape) * dtype.itemsize
    room = dataset.file.id.get_filesize() - (offset or 0)
    if num_bytes > room:
        raise DataError(
            f"{_where(dataset)} needs {num_bytes} bytes, and the file has {max(0, room)} where they would lie; it is "
            "damaged: write it again"
        )
    if dataset.id.get_create_plist().get_layout() == h5py.h5d.COMPACT:
        values = np.empty(dataset.shape, dtype)
        dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, values, dataset.id.get_type())
        inline, offset = values.tobytes(), 0
    if offset is None:
        return "its bytes have no place in this file"
    return Storage(
        path=dataset.file.filename,
        dtype=dtype,
        shape=dataset.shape,
        axis=0,
        chunk=(1, *dataset.shape[1:]),
        chunked=False,
        filters=(),
        offsets=np.array([[offset]], np.int64),
        sizes=np.array([[dataset.id.get_storage_size()]], np.int64),
        masks=None,
        inline=inline,
    )


def _verified(dataset: Any, storage: Storage) -> Storage | str:
    """Return the storage with offsets at which the values of some blocks are those HDF5 reads, or what differed."""
    if storage.inline:
        return storage
    user_block = dataset.file.userblock_size
    problem, equal = "", []
    with closing(Decoder()) as decoder:
        for base in dict.fromkeys((0, user_block)):
            moved = np.where(storage.offsets < 0, storage.offsets, storage.offsets + base)
            candidate = replace(storage, offsets=moved)
            problem = _difference(dataset, candidate, decoder)
            if not problem:
                equal.append(candidate)
    if len(equal) > 1:
        return f"its values do not tell whether addresses count from behind the user block of {user_block} bytes"
    if not equal and storage.chunked:
        _check_lookup(dataset, storage)
    return equal[0] if equal else f"bytes read without HDF5 differ from its own reading ({problem})"


def _difference(dataset: Any, storage: Storage, decoder: Decoder) -> str:
    # As opaque values: copying records would leave out what pads them.
    opaque = replace(storage, dtype=np.dtype((np.void, storage.dtype.itemsize)))
    for start, stop in _samples(storage):
        expected = _read_by_hdf5(dataset, storage, start, stop)
        found = np.empty(expected.shape, opaque.dtype)
        try:
            decoder.read(opaque, start, stop, found, lambda values, into: np.copyto(into, values), in_place=True)
        except (DataError, OSError) as error:
            return str(error)
        if found.tobytes() != expected.tobytes():
            return f"rows {start} to {stop - 1}"
    return ""


def _read_by_hdf5(dataset: Any, storage: Storage, start: int, stop: int) -> npt.NDArray[Any]:
    begin, shape = [0] * len(storage.shape), list(storage.shape)
    begin[storage.axis], shape[storage.axis] = start, stop - start
    values = np.empty(shape, storage.dtype)
    space = dataset.id.get_space()
    space.select_hyperslab(tuple(begin), tuple(shape))
    try:
        # Into the type of the file, so that HDF5 converts nothing and not a bit may differ.
        dataset.id.read(h5py.h5s.create_simple(tuple(shape)), space, values, dataset.id.get_type())
    except OSError as error:
        place = f'{dataset.file.filename}: dataset "{dataset.name}", rows {start} to {stop - 1}'
        raise DataError(f"{place} cannot be read; the file may be damaged. HDF5 says: {error}") from error
    return np.moveaxis(values, storage.axis, 0)


def _samples(storage: Storage) -> Iterator[tuple[int, int]]:
    """Yield the rows to compare: of the first, the middle and the last block, at most some mebibytes of each."""
    blocks = -(-storage.num_rows // storage.block_rows)
    row_bytes = max(1, storage.block_bytes // storage.block_rows)
    for block in sorted({0, blocks // 2, blocks - 1}):
        start = block * storage.block_rows
        yield start, start + max(1, min(storage.block_height(block), _CHECK_BYTES // row_bytes))
