"""Reading of rows by HDF5 itself: slower, but it reads whatever HDF5 reads.

HDF5 lets one thread in at a time, so that is all that may use a reader. `mpidp.hdf5.decode` is the fast way.
"""

from collections import OrderedDict
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from mpidp.errors import DataError, MpidpError
from mpidp.hdf5.convert_values import narrow_to_bfloat16
from mpidp.hdf5.dataset import DataSet
from mpidp.hdf5.decode import retried
from mpidp.hdf5.field import Field
from mpidp.hdf5.files.file import open_apart
from mpidp.hdf5.files.types import HDF5_ERRORS

_LEAST_CACHE_BYTES = 8 * 2**20
_MOST_CACHE_BYTES = 256 * 2**20


def read_rows(dataset: Any, member: str, axis: int, start: int, stop: int) -> npt.NDArray[Any]:
    """Return rows [start, stop) along `axis` of an open dataset as an array (stop - start, ...), read by HDF5.

    With `member`, it has that member of a compound only.
    """
    if not member:
        return np.moveaxis(dataset[(slice(None),) * axis + (slice(start, stop),)], axis, 0)
    kind = dataset.id.get_type()
    dtype = np.dtype([(member, kind.get_member_type(kind.get_member_index(member.encode())).dtype)])
    begin, shape = [0] * len(dataset.shape), list(dataset.shape)
    begin[axis], shape[axis] = start, stop - start
    values = np.zeros(shape, dtype)  # zeros: where values vary in length they are objects
    space = dataset.id.get_space()
    space.select_hyperslab(tuple(begin), tuple(shape))
    memory = h5py.h5s.create_simple(tuple(shape))
    dataset.id.read(memory, space, values, h5py.h5t.py_create(dtype))
    return np.moveaxis(values, axis, 0)


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
        """Return rows [start, stop) of a file as an array (stop - start, ...) of stored values.

        Of compounds they have the member of the field, if it has one; bfloat16 is its bits in uint16. Raises
        `DataError` when they cannot be read (after a few attempts where the error may pass).
        """
        try:
            values = retried(lambda: self._read(file, field, start, stop))
        except MpidpError:
            raise
        except HDF5_ERRORS as error:  # KeyError: the file was replaced by one without the dataset
            raise DataError(f"cannot be read; the file may be damaged. HDF5 says: {error}") from error
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
