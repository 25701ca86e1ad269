"""Enters: an open dataset of h5py. Leaves: where its bytes lie on disk, or why only HDF5 can read them.

Addresses are not trusted before values decoded from them equal those that HDF5 reads: a user block shifts
them, and a filter or a type may hold a surprise.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from mpidp.errors import DataError
from mpidp.hdf5.decode.convert import narrow_to_bfloat16
from mpidp.hdf5.decode.decode import Decoder
from mpidp.hdf5.decode.filters import NAMES, obstacle
from mpidp.hdf5.decode.raw_file import RawFiles
from mpidp.hdf5.decode.storage import Filter, Storage
from mpidp.hdf5.order.keyed import IntArray

_CHECK_BYTES = 4 * 2**20


def locate(dataset: Any, dtype: np.dtype[Any], axis: int) -> Storage | str:
    """Return the storage of a dataset whose values are `dtype` on disk, or why it cannot be read without HDF5.

    `axis`, at least 0, counts the samples.
    """
    filters = filters_of(dataset)
    reason = _type_obstacle(dataset, dtype) or obstacle(filters)
    if reason:
        return reason
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


def _type_obstacle(dataset: Any, dtype: np.dtype[Any]) -> str:
    kind = dataset.id.get_type()
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
    table = np.full((int(np.prod(grid, dtype=np.int64)), 3), (-1, 0, 0), dtype=np.int64)
    places, facts = _chunk_table(dataset)
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
        f'{dataset.file.filename}: dataset "{dataset.name}": its index of chunks is damaged, and HDF5 would read '
        "chunks that it does not find as fill values; write it again"
    )


def _fill(dataset: Any, dtype: np.dtype[Any]) -> bytes:
    if _is_bfloat16(dataset, dtype):
        return narrow_to_bfloat16(np.array([dataset.fillvalue])).astype(dtype).tobytes()
    return np.asarray(dataset.fillvalue, dtype=dtype).tobytes()


def _is_bfloat16(dataset: Any, dtype: np.dtype[Any]) -> bool:
    """Whether the dataset holds bfloat16, whose bits `dtype` stands for."""
    return dtype.kind == "u" and isinstance(dataset.id.get_type(), h5py.h5t.TypeFloatID)


def _chunk_table(dataset: Any) -> tuple[IntArray, IntArray]:
    """Return the first element (n, axes) and (offset, size, mask) (n, 3) of each chunk that was written.

    `chunk_iter` visits the index once. Asking for chunk after chunk searches it anew each time: 74 s where
    32,000 chunks take 0.05 s so.
    """
    places: list[tuple[int, ...]] = []
    facts: list[tuple[int, int, int]] = []

    def note(info: Any) -> None:
        places.append(info.chunk_offset)
        facts.append((info.byte_offset, info.size, info.filter_mask))

    dataset.id.chunk_iter(note)
    # Nothing lies beyond 2^63, but a damaged index may say so: reading there then fails.
    table = np.array(facts, np.uint64).astype(np.int64)
    return np.array(places, np.uint64).astype(np.int64).reshape(len(places), len(dataset.shape)), table


def _unchunked(dataset: Any, dtype: np.dtype[Any], axis: int) -> Storage | str:
    if axis != 0:
        return "without chunks, rows can only be read along the first axis"
    inline = b""
    offset = dataset.id.get_offset()
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
    with closing(RawFiles()) as files:
        for base in dict.fromkeys((0, user_block)):
            moved = np.where(storage.offsets < 0, storage.offsets, storage.offsets + base)
            candidate = replace(storage, offsets=moved)
            problem = _difference(dataset, candidate, Decoder(files))
            if not problem:
                equal.append(candidate)
    if len(equal) > 1:
        return f"its values do not tell whether addresses count from behind the user block of {user_block} bytes"
    if not equal and storage.chunked:
        _check_lookup(dataset, storage)
    return equal[0] if equal else f"bytes read without HDF5 differ from its own reading ({problem})"


def _difference(dataset: Any, storage: Storage, decoder: Decoder) -> str:
    for start, stop in _samples(storage):
        expected = _read_by_hdf5(dataset, storage, start, stop)
        try:
            found = b"".join(part.values.tobytes() for part in decoder.rows(storage, start, stop))
        except (DataError, OSError) as error:
            return str(error)
        if found != expected.tobytes():
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
