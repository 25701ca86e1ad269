"""Enters: two files and a range of bytes. Leaves: the range in both, the written one read back from disk and compared.

Several processes may copy ranges of the same file. CRC-32 tells whether the bytes read back are those that were read.
"""

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from mpidp.errors import DataError

_BLOCK_BYTES = 8 * 2**20


def copy_range(source: str, target: str, start: int, stop: int) -> None:
    """Copy bytes [start, stop) of `source` to the same place in `target`, which exists.

    Raises `DataError` when one cannot be read or written, and when the target holds something else afterwards.
    """
    block = memoryview(bytearray(min(_BLOCK_BYTES, max(1, stop - start))))
    with _open(source, os.O_RDONLY) as reading, _open(target, os.O_RDWR) as writing:
        copied = 0
        for at, part in _blocks(source, reading, start, stop, block):
            copied = zlib.crc32(part, copied)
            _write(target, writing, at, part)
        with _named(target, "written"):
            os.fdatasync(writing)
        # What is still in memory would only be compared with itself.
        os.posix_fadvise(writing, start, stop - start, os.POSIX_FADV_DONTNEED)
        found = 0
        for _, part in _blocks(target, writing, start, stop, block):
            found = zlib.crc32(part, found)
    if found != copied:
        raise DataError(
            f"{target}: bytes {start} to {stop - 1} have CRC-32 {found:08x} when read back, but {copied:08x} were "
            f"copied from {source}; the disk may be failing: stage to another folder, or leave this node out"
        )


def _blocks(path: str, descriptor: int, start: int, stop: int, block: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the bytes [start, stop) of a file, in order; each part is overwritten by the next."""
    while start < stop:
        with _named(path, "read"):
            count = os.preadv(descriptor, [block[: min(len(block), stop - start)]], start)
        if count == 0:
            raise DataError(f"{path}: ends at byte {start}, though it had at least {stop}; something cut it off")
        yield start, block[:count]
        start += count


def _write(path: str, descriptor: int, at: int, part: memoryview) -> None:
    with _named(path, "written"):
        while part:
            count = os.pwrite(descriptor, part, at)
            at, part = at + count, part[count:]


@contextmanager
def _open(path: str, flags: int) -> Iterator[int]:
    with _named(path, "opened"):
        descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _named(path: str, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be {what} while files are copied to the node: {error.strerror}") from error
