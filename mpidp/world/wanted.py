"""Enters: numbers of rows that lie in the memory of several ranks. Leaves: which rank holds which, and runs of them."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Wanted:
    """Rows in ascending order: `ranks` hold them, as their own rows number `rows` (int64 arrays)."""

    ranks: IntArray
    rows: IntArray

    def runs(self) -> tuple[IntArray, IntArray]:
        """Return where runs of neighbouring rows of one rank begin, and how many rows each has (int64)."""
        if not len(self.rows):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        breaks = (np.diff(self.ranks) != 0) | (np.diff(self.rows) != 1)
        begins = np.concatenate(([0], np.flatnonzero(breaks) + 1)).astype(np.int64)
        return begins, np.diff(np.append(begins, len(self.rows)))


class Transport(Protocol):
    """How rows of other ranks come here."""

    def start(self, wanted: Wanted, into: ByteArray) -> None:
        """Ask for rows; `into` (n, row_bytes) is filled when `finish` returns, but for this rank's own rows."""

    def finish(self) -> None:
        """Wait for them."""
