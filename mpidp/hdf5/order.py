"""The order of the samples in every epoch, the steps that ranks take through it, and the split of a data set in two.

Which samples form a global batch depends on (seed, epoch, streams, mixing_chunks, global_batch) and never on the number
of ranks. Each sample comes exactly once an epoch, every rank takes the same number of steps, and one integer, the
number of global samples consumed, is all that resuming needs. Only NumPy is imported here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal, get_args

import numpy as np

from mpidp.errors import DataError
from mpidp.hdf5.plan import (
    SPLIT_PHASE,
    SPLIT_ROWS,
    EpochPlan,
    FilePlan,
    FullPlan,
    IntArray,
    StreamPlan,
    check_seed,
    permutation,
    words,
)

Shuffle = Literal["streams", "full", "none"]


@dataclass(frozen=True, eq=False)
class Order:
    """The order of a data set.

    Attributes:
        chunk_rows: int64 lengths of consecutive row ranges that are read together; they may be 0.
        seed: 0 to 2^64 - 1.
        streams: how many parts of the permuted chunks a batch takes its samples from in turn.
        mixing_chunks: how many chunks of a stream have their rows permuted together.
        global_batch: the samples of one step over all ranks.
        shuffle: "streams" (whole chunks are read, once), "full" (any permutation, slow on large chunks) or "none" (file
            order).
        drop_last: leave out the last step of an epoch if it has fewer samples than `global_batch`.

    Raises:
        DataError: a value out of range, or a data set of no rows.
    """

    chunk_rows: IntArray
    seed: int
    streams: int
    mixing_chunks: int
    global_batch: int
    shuffle: Shuffle = "streams"
    drop_last: bool = False

    def __post_init__(self) -> None:
        chunk_rows = np.array(self.chunk_rows, dtype=np.int64)
        chunk_rows.flags.writeable = False
        object.__setattr__(self, "chunk_rows", chunk_rows)
        check_seed(self.seed)
        for name in ("streams", "mixing_chunks", "global_batch"):
            value = getattr(self, name)
            if value < 1:
                raise DataError(f"{name} is {value}; give an integer of at least 1")
        if self.shuffle not in get_args(Shuffle):
            raise DataError(f'shuffle is {self.shuffle!r}; give "streams", "full" or "none"')
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
        return StreamPlan(self.chunk_rows, self.global_batch, self.seed, epoch, self.streams, self.mixing_chunks)


# A bijection costs the same for one row and for hundreds: so those of some steps are computed at once.
_STEPS_AT_ONCE = 32


@dataclass(frozen=True)
class Share:
    """What `rank` of `size` reads, from `position` in `epoch` on."""

    epoch: int
    position: int
    size: int
    rank: int


@dataclass(frozen=True)
class Step:
    """The step [start, stop) of an epoch, in global samples."""

    epoch: int
    start: int
    stop: int


def steps(order: Order, share: Share) -> Iterator[Step]:
    """Yield the steps from `share` on without end: epoch follows epoch, so that the next is read ahead of its start."""
    epoch, position = share.epoch, share.position
    while True:
        end = order.end(position)
        while position < end:
            stop = min(position + order.global_batch, end)
            yield Step(epoch, position, stop)
            position = stop
        epoch, position = epoch + 1, 0


def step_rows(order: Order, share: Share) -> Iterator[tuple[Step, IntArray]]:
    """Yield each step from `share` on, without end, with the selected rows (int64) that the rank has in it."""
    endless = steps(order, share)
    plan, planned = order.plan(share.epoch), share.epoch
    while True:
        coming = list(islice(endless, _STEPS_AT_ONCE))
        for epoch in sorted({step.epoch for step in coming}):
            if epoch != planned:
                plan, planned = order.plan(epoch), epoch
            own = [step for step in coming if step.epoch == epoch]
            indices = [plan.local_indices(step.start, share.size, share.rank) for step in own]
            rows = plan.rows(np.concatenate(indices))
            yield from zip(own, np.split(rows, np.cumsum([len(each) for each in indices])[:-1]), strict=True)


Part = Literal["train", "validation"]


class Split:
    """Rows in two parts: round(fraction * rows) for validation, the others for training.

    Raises `DataError` for a fraction outside (0, 1), and when a part would be empty.
    """

    def __init__(self, chunk_rows: IntArray, fraction: float, seed: int) -> None:
        check_seed(seed)
        if not 0.0 < fraction < 1.0:
            raise DataError(f"the validation fraction is {fraction}; give a number between 0 and 1")
        self._chunk_rows = np.asarray(chunk_rows, dtype=np.int64)
        self._seed = seed
        num_rows = int(self._chunk_rows.sum())
        validation = round(fraction * num_rows)
        if not 0 < validation < num_rows:
            raise DataError(
                f"a validation fraction of {fraction} of {num_rows} rows leaves {num_rows - validation} rows "
                f"for training and {validation} for validation; both need at least one: change the fraction"
            )
        phase = int(words(1, seed, SPLIT_PHASE)[0]) % num_rows
        self._validation = _shares(self._chunk_rows, validation, phase)

    def counts(self, part: Part) -> IntArray:
        """Return the number of rows of `part` in each chunk (int64)."""
        return self._validation.copy() if part == "validation" else self._chunk_rows - self._validation

    def rows(self, chunk: int, part: Part) -> IntArray:
        """Return the rows of `part` in `chunk`: ascending int64 offsets from the chunk's first row."""
        share = int(self._validation[chunk])
        drawn = permutation(int(self._chunk_rows[chunk]), self._seed, SPLIT_ROWS, chunk)
        return np.sort(drawn[:share] if part == "validation" else drawn[share:])


def _shares(chunk_rows: IntArray, total: int, phase: int) -> IntArray:
    """Return shares of `total` in proportion to `chunk_rows`, each within one of exact, `total` in sum."""
    num_rows = int(chunk_rows.sum())
    # Python integers: rows * total passes 2^63 from some 4 * 10^9 rows on.
    ends = np.cumsum(chunk_rows).astype(object)
    filled = ((ends * total + phase) // num_rows).astype(np.int64)
    return np.diff(filled, prepend=0)
