"""Enters: a `DataSet`, a file number, a field, a range of rows. Leaves: their values as a NumPy array.

Opens files when they are first read, in the thread that reads, and keeps few of them open.
"""

import os
from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidp.errors import DataError
from mpidp.hdf5.dataset import DataSet, Field
from mpidp.hdf5.file import open_file, retried

_LEAST_CACHE_BYTES = 8 * 2**20
_MOST_CACHE_BYTES = 256 * 2**20


class Reader:
    """Reads rows of the files of a `DataSet`, for one thread of the process that made it.

    At most `most_open` files are open at a time.
    """

    def __init__(self, dataset: DataSet, most_open: int = 16) -> None:
        self._dataset = dataset
        self._most_open = most_open
        self._open: OrderedDict[int, Any] = OrderedDict()
        # The datasets of the file read last. HDF5 caches chunks for as long as a dataset is open, and only those
        # of one file, so that the memory of the caches does not grow with the number of files.
        self._current = -1
        self._datasets: dict[str, Any] = {}
        self._pid = os.getpid()
        # Two chunks: a lane may end inside a chunk, and the next lane then finds the rest decoded.
        largest = max(file.range_rows for file in dataset.files) * max(f.row_bytes for f in dataset.fields)
        self._cache_bytes = min(max(_LEAST_CACHE_BYTES, 2 * largest), _MOST_CACHE_BYTES)

    def read(self, file: int, field: Field, start: int, stop: int) -> npt.NDArray[Any]:
        """Return rows [start, stop) of a file as an array (stop - start, *field.shape) of `field.dtype`.

        Raises `DataError` when they cannot be read (after a few attempts where the error may pass), when a
        uint64 does not fit int64, and in a process forked from the one that made this reader.
        """
        if os.getpid() != self._pid:
            raise DataError(
                f"this reader was made in process {self._pid} and is used in its fork {os.getpid()}; an HDF5 "
                "file shared over a fork gives wrong data: read in threads, or make the loader in the child"
            )
        try:
            values = retried(lambda: self._read(file, field, start, stop))
        except (OSError, KeyError) as error:  # KeyError: the file was replaced by one without the dataset
            where = self._where(file, field, start, stop)
            raise DataError(f"{where} cannot be read; the file may be damaged. HDF5 says: {error}") from error
        if field.stored == np.uint64 and values.size and values.max() > np.iinfo(np.int64).max:
            raise DataError(
                f"{self._where(file, field, start, stop)} holds {values.max()}, which int64 cannot hold, and "
                "torch computes with no larger integer; write it as float64 or as two fields"
            )
        return values.astype(field.dtype, copy=False)

    def close(self) -> None:
        """Close all files. Reading opens them again."""
        for file in list(self._open):
            self._close(file)

    def _read(self, file: int, field: Field, start: int, stop: int) -> npt.NDArray[Any]:
        try:
            if file != self._current:
                self._turn_to(file)
            values: npt.NDArray[Any] = self._datasets[field.name][start:stop]
        except OSError:
            # A stale handle stays stale: the next attempt, if any, opens the file anew.
            self._close(file)
            raise
        return values

    def _turn_to(self, file: int) -> None:
        self._forget_current()
        if file not in self._open:
            while len(self._open) >= self._most_open:
                self._close(next(iter(self._open)))
            self._open[file] = open_file(self._dataset.files[file].path, self._cache_bytes)
        self._open.move_to_end(file)
        self._datasets = {field.name: self._open[file][field.name] for field in self._dataset.fields}
        self._current = file

    def _close(self, file: int) -> None:
        if file == self._current:
            self._forget_current()
        if file in self._open:
            self._open.pop(file).close()

    def _forget_current(self) -> None:
        self._datasets = {}
        self._current = -1

    def _where(self, file: int, field: Field, start: int, stop: int) -> str:
        return f'{self._dataset.files[file].path}: dataset "{field.name}", rows {start} to {stop - 1}'
