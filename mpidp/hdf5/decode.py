"""Reading and decoding of rows without HDF5, from the places in the file that a `Storage` lists.

Reading, inflating and copying release Python's lock, so threads decode in parallel. Each thread has its own buffers,
and keeps a few files open.
"""

import errno
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mpidp.errors import DataError
from mpidp.hdf5.dataset import Storage
from mpidp.hdf5.filters import Bytes, Scratch, undo

Array = npt.NDArray[Any]
Convert = Callable[[Array, Array], None]
T = TypeVar("T")

_MOST_AT_ONCE = 2**30  # Linux reads at most 2 GiB less a page in one call
# Chunks that lie closer than this are read together: a seek costs more than reading what is between.
_GAP_BYTES = 64 * 2**10
_MOST_TOGETHER_BYTES = 8 * 2**20

_TRANSIENT = {errno.EIO, errno.ESTALE, errno.EINTR}
_BACK_OFF_S = (0.1, 0.4, 1.6)


def retried(
    action: Callable[[], T], failure: OSError | None = None, before_again: Callable[[], None] | None = None
) -> T:
    """Return action(), called again a few times, with pauses, after an I/O error that may pass.

    `failure` is that of an attempt that was already made. `before_again` is called before each further attempt.
    """
    for pause_s in _BACK_OFF_S:
        try:
            if failure is not None:
                raise failure
            return action()
        except OSError as error:
            if error_number(error) not in _TRANSIENT:
                raise
            failure = None
        time.sleep(pause_s)
        if before_again is not None:
            before_again()
    return action()


def error_number(error: OSError) -> int | None:
    """Return the system's error number; HDF5 often only writes it into its text."""
    written = re.search(r"errno = (\d+)", str(error))
    return error.errno or (int(written.group(1)) if written else None)


class RawFiles:
    """Reads bytes of files. Each thread keeps at most `most_open` of them open, so that none waits for another."""

    def __init__(self, most_open: int = 8) -> None:
        self._most_open = most_open
        self._own = threading.local()
        self._all: list[OrderedDict[str, int]] = []

    def read(self, path: str, offset: int, into: Bytes) -> None:
        """Fill `into` with the bytes of the file from `offset` on; raises OSError, or `DataError` at its end."""
        try:
            _fill(self._descriptor(path), path, offset, into)
        except OSError as error:
            self._forget(path)  # a stale handle stays stale: the next attempt opens the file anew
            retried(lambda: _fill(self._descriptor(path), path, offset, into), error, lambda: self._forget(path))

    def close(self) -> None:
        """Close all files, of all threads, none of which may be reading. Reading opens them again."""
        for descriptors in self._all:
            while descriptors:
                os.close(descriptors.popitem()[1])

    def _descriptor(self, path: str) -> int:
        descriptors: OrderedDict[str, int] | None = getattr(self._own, "descriptors", None)
        if descriptors is None:
            descriptors = self._own.descriptors = OrderedDict()
            self._all.append(descriptors)
        descriptor = descriptors.get(path)
        if descriptor is None:
            while len(descriptors) >= self._most_open:
                os.close(descriptors.popitem(last=False)[1])
            descriptor = descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        descriptors.move_to_end(path)
        return descriptor

    def _forget(self, path: str) -> None:
        descriptor = getattr(self._own, "descriptors", {}).pop(path, None)
        if descriptor is not None:
            os.close(descriptor)


def _fill(descriptor: int, path: str, offset: int, into: Bytes) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done : done + _MOST_AT_ONCE].data], offset + done)
        if count == 0:
            raise DataError(f"{path}: ends at byte {offset + done}, where {len(into) - done} more were expected")
        done += count


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.scratch = Scratch()
        self.raw = np.empty(0, np.uint8)
        self.block = np.empty(0, np.uint8)

    def room(self, name: str, num_bytes: int) -> Bytes:
        buffer: Bytes = getattr(self, name)
        if len(buffer) < num_bytes:
            buffer = np.empty(num_bytes + num_bytes // 8, np.uint8)
            setattr(self, name, buffer)
        return buffer[:num_bytes]


class Decoder:
    """Reads and decodes rows; may be used by several threads."""

    def __init__(self) -> None:
        self._files = RawFiles()
        self._buffers = _Buffers()

    def read(self, storage: Storage, start: int, stop: int, into: Array, convert: Convert, in_place: bool) -> None:
        """Fill `into` (stop - start, ...) with rows [start, stop) of `storage`, at least one.

        `convert(values, part)` fills a part of `into` with stored values (n, ...). With `in_place`, `into` has room
        for just the stored bytes, and whatever can be decoded straight into it is not converted.

        Raises OSError and `DataError`, which name the place in the file.
        """
        room = into.reshape(-1).view(np.uint8) if in_place else None
        offset = _raw_offset(storage, start, stop)
        if offset >= 0:
            if room is not None and not storage.inline:
                self._files.read(storage.path, offset, room)
            else:
                convert(self._raw_rows(storage, offset, stop - start), into)
            return
        first, last = start // storage.block_rows, (stop - 1) // storage.block_rows
        for block, raw in self._raw_blocks(storage, first, last):
            begin = block * storage.block_rows
            end = begin + storage.block_rows
            if room is not None and start <= begin and end <= stop:
                place = (begin - start) * storage.row_bytes
                self._block(storage, block, raw, room[place : place + storage.block_rows * storage.row_bytes])
                continue
            values = self._block(storage, block, raw, None)
            low, high = max(start, begin), min(stop, end)
            convert(values[low - begin : high - begin], into[low - start : high - start])

    def close(self) -> None:
        """Close all files. Reading opens them again."""
        self._files.close()

    def _raw_rows(self, storage: Storage, offset: int, count: int) -> Array:
        num_bytes = count * storage.row_bytes
        if storage.inline:
            raw = np.frombuffer(storage.inline, np.uint8)[offset : offset + num_bytes]
        else:
            raw = self._buffers.room("raw", num_bytes)
            self._files.read(storage.path, offset, raw)
        return raw.view(storage.dtype).reshape(count, *storage.row_shape)

    def _raw_blocks(self, storage: Storage, first: int, last: int) -> Iterator[tuple[int, list[Bytes | None]]]:
        """Yield (block, bytes of each of its tiles as stored), reading neighbours together."""
        tiles, block = storage.tiles_per_block, first
        while block <= last:
            count = 1
            if block < last:
                ends = np.cumsum(storage.sizes[block : last + 1].sum(axis=1))
                count = max(1, int(np.searchsorted(ends, _MOST_TOGETHER_BYTES, side="right")))
            if count * tiles == 1:  # the usual case, without the cost of the others
                pieces = [self._raw_chunk(storage, block)]
            else:
                offsets, sizes = storage.offsets[block : block + count], storage.sizes[block : block + count]
                pieces = self._read_near(storage.path, offsets.ravel(), sizes.ravel())
            for number in range(count):
                yield block + number, pieces[number * tiles : (number + 1) * tiles]
            block += count

    def _raw_chunk(self, storage: Storage, block: int) -> Bytes | None:
        """Return the bytes of the only chunk of a block as stored."""
        offset, size = int(storage.offsets[block, 0]), int(storage.sizes[block, 0])
        if offset < 0:
            return None
        raw = self._buffers.room("raw", size)
        self._files.read(storage.path, offset, raw)
        return raw

    def _read_near(self, path: str, offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> list[Bytes | None]:
        """Return the bytes at each offset, None at offset -1, by as few reads as their places allow."""
        pieces: list[Bytes | None] = [None] * len(offsets)
        order = np.argsort(offsets, kind="stable")
        order = order[offsets[order] >= 0]
        runs = _runs(offsets[order], sizes[order])
        spans = [(int(offsets[order[a]]), int((offsets[order[a:b]] + sizes[order[a:b]]).max())) for a, b in runs]
        buffer = self._buffers.room("raw", sum(stop - start for start, stop in spans))
        for (a, b), (start, stop) in zip(runs, spans, strict=True):
            part, buffer = buffer[: stop - start], buffer[stop - start :]
            self._files.read(path, start, part)
            for piece in order[a:b].tolist():
                place = int(offsets[piece]) - start
                pieces[piece] = part[place : place + int(sizes[piece])]
        return pieces

    def _block(self, storage: Storage, block: int, raw: list[Bytes | None], into: Bytes | None) -> Array:
        """Return the values (block_rows, *row_shape) of a block; rows past the end of the dataset are padding."""
        if storage.is_row_wise:
            return self._chunk(storage, block, 0, raw[0], into)
        height = storage.block_rows
        room = self._buffers.room("block", height * storage.row_bytes) if into is None else into
        values = room.view(storage.dtype).reshape(height, *storage.row_shape)
        for tile, (within_row, within_chunk) in enumerate(storage.tiles()):
            chunk = np.moveaxis(self._chunk(storage, block, tile, raw[tile], None), storage.axis, 0)
            values[(slice(None), *within_row)] = chunk[(slice(None), *within_chunk)]
        return values

    def _chunk(self, storage: Storage, block: int, tile: int, raw: Bytes | None, into: Bytes | None) -> Array:
        """Return the values of a chunk, in its own shape; `raw` are its stored bytes, None of one never written."""
        if raw is None:
            room = self._buffers.scratch.buffer(storage.chunk_bytes) if into is None else into
            values = room.view(storage.dtype).reshape(storage.chunk)
            values[...] = np.frombuffer(storage.fill, storage.dtype)
            return values
        mask = 0 if storage.masks is None else int(storage.masks[block, tile])
        rest = storage.filters, mask, storage.chunk_bytes, self._buffers.scratch, into
        try:
            decoded = undo(raw, *rest)
        except DataError:
            # Some network file systems deliver a wrong page once in a while: what is wrong twice is damaged.
            offset, again = int(storage.offsets[block, tile]), np.empty_like(raw)
            self._files.read(storage.path, offset, again)
            try:
                decoded = undo(again, *rest)
            except DataError as error:
                raise DataError(f"chunk at byte {offset} of {storage.path}: {error}") from error
        return decoded.view(storage.dtype).reshape(storage.chunk)


def _raw_offset(storage: Storage, start: int, stop: int) -> int:
    """Return where rows [start, stop) lie in the file, if as they are and in one piece; -1 if not."""
    if storage.is_plain:
        return int(storage.offsets[0, 0]) + start * storage.row_bytes
    block, inside = divmod(start, storage.block_rows)
    if not storage.is_raw or inside + stop - start > storage.block_rows:
        return -1
    offset, size = int(storage.offsets[block, 0]), int(storage.sizes[block, 0])
    # A chunk that was never written has no place, and one of another size is damaged.
    return offset + inside * storage.row_bytes if offset >= 0 and size == storage.chunk_bytes else -1


def _runs(offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return ranges [a, b) of ascending pieces that are near each other."""
    if not len(offsets):
        return []
    breaks = np.flatnonzero(offsets[1:] - (offsets + sizes)[:-1] > _GAP_BYTES) + 1
    edges = [0, *breaks.tolist(), len(offsets)]
    return list(pairwise(edges))
