"""Enters: nothing. Leaves: what every source of a conversion offers, so that it can be read in any thread."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidp.hdf5.copy import Template
from mpidp.hdf5.order.keyed import IntArray

Values = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class SourceField:
    """A dataset that the conversion will write: `num_rows` arrays of `shape`.

    `read_rows` are the rows that a source has to decode together, 1 where it reads any row by itself. For `type_name`,
    `like` and `fill` see `NewDataset`.
    """

    name: str
    num_rows: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read_rows: int = 1
    type_name: str = ""
    like: str = ""
    fill: bytes = b""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Source(ABC):
    """Rows to be written as HDF5. Several threads take rows at once."""

    @property
    @abstractmethod
    def fields(self) -> tuple[SourceField, ...]:
        """The datasets that it becomes, in the order in which they are written."""

    @abstractmethod
    def take(self, names: Sequence[str], rows: IntArray) -> Values:
        """Return the rows (any order, any subset) of fields with equal numbers of rows, as (rows, *shape).

        Raises `DataError` naming the place for values that cannot be read.
        """

    def close(self) -> None:
        """Close what is open."""
        return

    @property
    def texts(self) -> Mapping[str, Sequence[str]]:
        """Datasets of strings that are written besides, such as the names of classes."""
        return {}

    @property
    def template(self) -> Template | None:
        """The HDF5 file of which all that is not written anew is copied."""
        return None

    @property
    def remarks(self) -> Sequence[str]:
        """What the user should know: what was left out, and why."""
        return ()


def is_run(rows: IntArray) -> bool:
    """Return whether the rows follow each other."""
    return bool(len(rows)) and bool(np.all(np.diff(rows) == 1))
