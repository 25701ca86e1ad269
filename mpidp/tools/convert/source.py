"""Enters: nothing. Leaves: what every source of a conversion offers, so that it can be read in any process."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidp.hdf5.order.keyed import IntArray
from mpidp.hdf5.write.write import Template

Values = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class SourceField:
    """A dataset that the conversion will write: `num_rows` arrays of `shape`.

    `read_rows` are the rows that a source has to decode together, 1 where it reads any row by itself.
    """

    name: str
    num_rows: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    attributes: Mapping[str, Any]
    read_rows: int = 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Source(ABC):
    """Rows to be written as HDF5. It is pickled and read in several processes; open files stay behind."""

    @property
    @abstractmethod
    def fields(self) -> tuple[SourceField, ...]:
        """The datasets that it becomes, in the order in which they are written."""

    @abstractmethod
    def take(self, names: Sequence[str], rows: IntArray) -> Values:
        """Return the rows (any order, any subset) of fields with equal numbers of rows, as (rows, *shape).

        Raises `DataError` naming the place for values that cannot be read.
        """

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return what must be the same (as JSON) for a conversion to be continued."""

    @property
    def texts(self) -> Mapping[str, Sequence[str]]:
        """Datasets of strings that are written besides, such as the names of classes."""
        return {}

    @property
    def template(self) -> Template | None:
        """The HDF5 file whose attributes are copied."""
        return None

    @property
    def remarks(self) -> Sequence[str]:
        """What the user should know: what was left out, and why."""
        return ()


def file_identity(path: str | Path) -> list[Any]:
    """Return what tells whether a file is still the same: absolute path, bytes, time of the last change in ns."""
    status = Path(path).stat()
    return [str(Path(path).absolute()), status.st_size, status.st_mtime_ns]


def is_run(rows: IntArray) -> bool:
    """Return whether the rows follow each other."""
    return bool(len(rows)) and bool(np.all(np.diff(rows) == 1))
