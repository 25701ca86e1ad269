"""Enters: paths, offsets, lengths. Leaves: bytes of files, read without HDF5 by any number of threads.

Descriptors are kept, but few of them: a data set may have more files than a process may open.
"""

import os
import threading
from collections import OrderedDict

from mpidp.errors import DataError
from mpidp.hdf5.decode.filters import Bytes
from mpidp.hdf5.decode.retry import retried

_MOST_AT_ONCE = 2**30  # Linux reads at most 2 GiB less a page in one call


class RawFiles:
    """Reads bytes of files. Each thread keeps at most `most_open` of them open, so that none waits for another."""

    def __init__(self, most_open: int = 8) -> None:
        self._most_open = most_open
        self._own = threading.local()
        self._all: list[OrderedDict[str, int]] = []

    def read(self, path: str, offset: int, into: Bytes) -> None:
        """Fill `into` with the bytes of the file from `offset` on.

        Raises OSError as the system does, after a few attempts where it may pass, and `DataError` at the
        file's end.
        """
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
