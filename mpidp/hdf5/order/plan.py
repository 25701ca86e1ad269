"""Enters: global sample numbers of one epoch. Leaves: row numbers, and which of them belong to a rank.

Three plans share this interface: rows in lanes (`lanes.py`), rows as they lie in the file, and rows permuted
as a whole (`bijection.py`). All hold memory in proportion to chunks, never to rows.
"""

from abc import ABC, abstractmethod

import numpy as np

from mpidp.errors import DataError
from mpidp.hdf5.order.bijection import Bijection
from mpidp.hdf5.order.keyed import IntArray


class EpochPlan(ABC):
    """The order of one epoch: global index i in [0, num_samples) -> row, and the owner of i in each step.

    A step that starts at position p (global samples consumed) is the range [p, min(p + global_batch,
    num_samples)). Which rows it holds never depends on the number of ranks; who reads them does.
    """

    def __init__(self, num_samples: int, global_batch: int) -> None:
        self.num_samples = num_samples
        self.global_batch = global_batch

    def step(self, position: int) -> tuple[int, int]:
        """Return (start, stop) in global indices of the step that starts at `position`.

        Raises `DataError` when `position` is not in [0, num_samples].
        """
        if not 0 <= position <= self.num_samples:
            raise DataError(f"position {position} is outside this epoch of {self.num_samples} samples")
        return position, min(position + self.global_batch, self.num_samples)

    @abstractmethod
    def rows(self, indices: IntArray) -> IntArray:
        """Return the row (int64) of each global index: a bijection of [0, num_samples)."""

    @abstractmethod
    def local_indices(self, position: int, size: int, rank: int) -> IntArray:
        """Return the global indices (int64, ascending) that `rank` of `size` reads in the step at `position`.

        Over the ranks of any `size` these are a partition of the step.
        """


class FilePlan(EpochPlan):
    """Rows in file order; a global batch is cut into `size` runs whose lengths differ by at most one."""

    def rows(self, indices: IntArray) -> IntArray:
        """Return the indices themselves: row i is sample i."""
        return np.asarray(indices, dtype=np.int64)

    def local_indices(self, position: int, size: int, rank: int) -> IntArray:
        """Return the rank's run of the step that starts at `position`."""
        start, stop = self.step(position)
        count = stop - start
        return np.arange(start + count * rank // size, start + count * (rank + 1) // size, dtype=np.int64)


class FullPlan(FilePlan):
    """Any row next to any other: a keyed bijection of all rows; ranks take runs as in `FilePlan`."""

    def __init__(self, num_samples: int, global_batch: int, seed: int, epoch: int) -> None:
        super().__init__(num_samples, global_batch)
        self._bijection = Bijection(num_samples, seed, epoch)

    def rows(self, indices: IntArray) -> IntArray:
        """Return the row (int64) that the bijection gives each global index."""
        return self._bijection(indices)
