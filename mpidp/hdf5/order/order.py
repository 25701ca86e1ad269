"""Enters: chunk row counts, a seed, how to shuffle. Leaves: the order of the samples in every epoch.

Which samples form a global batch depends on (seed, epoch, lanes, mixing_chunks, global_batch) and never on
the number of ranks; each sample comes exactly once an epoch; every rank takes the same number of steps; and
one integer, the number of global samples consumed, is all that resuming needs. Only NumPy is imported here.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from mpidp.errors import DataError
from mpidp.hdf5.order.keyed import IntArray, check_seed
from mpidp.hdf5.order.lanes import LanePlan
from mpidp.hdf5.order.plan import EpochPlan, FilePlan, FullPlan

Shuffle = Literal["lanes", "full", "none"]


@dataclass(frozen=True, eq=False)
class Order:
    """The order of a data set.

    `chunk_rows` (int64) are the lengths of consecutive row ranges that are read together; they may be 0.
    `lanes` is the number of virtual workers, `mixing_chunks` the number of chunks whose rows are permuted
    together inside a lane, `global_batch` the samples of one step over all ranks. `shuffle`: "lanes" (whole
    chunks are read, once), "full" (any permutation, slow on large chunks) or "none" (file order). `drop_last`
    leaves out the last step of an epoch if it has fewer samples than `global_batch`.

    Raises `DataError` for a value out of range and for a data set of no rows.
    """

    chunk_rows: IntArray
    seed: int
    lanes: int
    mixing_chunks: int
    global_batch: int
    shuffle: Shuffle = "lanes"
    drop_last: bool = False

    def __post_init__(self) -> None:
        chunk_rows = np.array(self.chunk_rows, dtype=np.int64)
        chunk_rows.flags.writeable = False
        object.__setattr__(self, "chunk_rows", chunk_rows)
        check_seed(self.seed)
        for name in ("lanes", "mixing_chunks", "global_batch"):
            value = getattr(self, name)
            if value < 1:
                raise DataError(f"{name} is {value}; give an integer of at least 1")
        if self.shuffle not in get_args(Shuffle):
            raise DataError(f'shuffle is {self.shuffle!r}; give "lanes", "full" or "none"')
        if len(chunk_rows) and chunk_rows.min() < 0:
            raise DataError(f"chunk_rows holds {chunk_rows.min()}; a chunk cannot have fewer than 0 rows")
        if self.num_samples == 0:
            raise DataError("the data set has no rows, so there is nothing to order")
        if self.end() == 0:
            raise DataError(
                f"global_batch is {self.global_batch}, but there are only {self.num_samples} samples: drop_last leaves "
                "no step; give at most that many"
            )

    @property
    def num_samples(self) -> int:
        """The number of samples in an epoch."""
        return int(self.chunk_rows.sum())

    def steps(self, position: int = 0) -> int:
        """Return how many steps, on every rank alike, remain from `position` to the end of the epoch."""
        return -((position - self.end(position)) // self.global_batch)

    def end(self, position: int = 0) -> int:
        """Return where the last step ends of an epoch that is taken from `position` on, in global samples."""
        num_samples = self.num_samples
        return num_samples - (num_samples - position) % self.global_batch * self.drop_last

    def plan(self, epoch: int) -> EpochPlan:
        """Return the order of `epoch`, counted from 0."""
        if epoch < 0:
            raise DataError(f"epoch is {epoch}; epochs count from 0")
        if self.shuffle == "none":
            return FilePlan(self.num_samples, self.global_batch)
        if self.shuffle == "full":
            return FullPlan(self.num_samples, self.global_batch, self.seed, epoch)
        return LanePlan(self.chunk_rows, self.global_batch, self.seed, epoch, self.lanes, self.mixing_chunks)
