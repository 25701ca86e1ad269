"""The order of the samples in every epoch, and the steps that ranks take through it.

Which samples form a global batch depends on (seed, epoch, streams, mixing_chunks, global_batch) and never on
the number of ranks; each sample comes exactly once an epoch; every rank takes the same number of steps; and
one integer, the number of global samples consumed, is all that resuming needs. Only NumPy is imported here.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal, get_args

import numpy as np

from mpidp.errors import DataError
from mpidp.hdf5.order.keyed import IntArray, check_seed
from mpidp.hdf5.order.plan import EpochPlan, FilePlan, FullPlan, StreamPlan

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


log = logging.getLogger("mpidp")


class Passes:
    """Passes over the epochs of an order, one after the other, at one position in the current one."""

    order: Order

    def __init__(self) -> None:
        self._epoch = 0
        self._position = 0
        self._continues = False  # the next pass goes on from the position because someone asked for it
        self._told = False

    @property
    def num_samples(self) -> int:
        """Samples of an epoch, over all ranks."""
        return self.order.num_samples

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0."""
        return self._epoch

    @property
    def position(self) -> int:
        """Global samples of the current epoch that were handed out."""
        return self._position

    @property
    def remaining_steps(self) -> int:
        """Steps from the position to the end of the current epoch."""
        return self.order.steps(self._position)

    def __len__(self) -> int:
        """Return the number of steps of a whole epoch."""
        return self.order.steps()

    def _begin_pass(self, over: str, name: str, speaks: bool) -> None:
        """Choose where a pass begins: behind the position only in a shuffled order, or if someone asked for it.

        Args:
            over: what the loop is over, for the message.
            name: of the variable that holds it, likewise.
            speaks: whether this rank says that a pass goes on which was left.
        """
        if not self.remaining_steps:
            self._finish_epoch()
        if self._position and not self._continues:
            if self.order.shuffle == "none":
                self._position = 0
            elif not self._told and speaks:
                self._told = True
                log.warning(
                    "the loop over %s goes on behind the %s of %s samples of epoch %d that the last loop was handed "
                    "before it was left; %s.restart() before a loop begins the epoch anew",
                    over,
                    f"{self._position:,}",
                    f"{self.num_samples:,}",
                    self._epoch,
                    name,
                )
        self._continues = False

    def _finish_epoch(self) -> None:
        self._epoch, self._position = self._epoch + 1, 0
