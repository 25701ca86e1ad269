"""The class `Shares`: batches of a `torch.utils.data.DataLoader`, divided among ranks as an `HDF5Loader`'s are."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mpidp.errors import DataError
from mpidp.hdf5.batch import Batch, Passes, check_agreed
from mpidp.hdf5.order import Order, Share, Step, step_rows
from mpidp.hdf5.plan import EpochPlan, IntArray

if TYPE_CHECKING:
    from mpidp.world.world import World

T = TypeVar("T")
log = logging.getLogger("mpidp")


class Shares(Passes):
    """A batch sampler that gives each rank its samples of every global batch; constructing it is collective.

        shares = mpidp.shares(len(dataset), global_batch=64, seed=0)
        loader = DataLoader(dataset, batch_sampler=shares, num_workers=4)
        for epoch in range(5):
            for share, (x, y) in shares.steps(loader):
                share.weigh(F.cross_entropy(model(x), y)).backward()
                optimizer.step()
                optimizer.zero_grad()

    Every sample comes once an epoch, in an order that depends on seed and epoch; a global batch holds the same
    samples at any number of ranks, and every rank takes the same number of steps. Epoch follows epoch by itself.
    A step counts as consumed when `steps` hands it out, whatever the workers of the DataLoader have prefetched;
    `state_dict()` is that position, from which another number of ranks and another global batch may go on.

    Args:
        num_samples: length of the data set, which is indexed by 0 to `num_samples` - 1.
        global_batch: samples of a step over all ranks.
        seed: of the order.
        shuffle: False for the order of the data set, in which every loop begins at the start.
        drop_last: leave out an epoch's last step if it has fewer than `global_batch` samples.
        world: the ranks; those of `mpidp.init()` by default, and this process alone if it was not called.

    Raises:
        DataError: a value that cannot be used.
        MismatchError: on every rank, when ranks were given different values.
        LaunchError: no `world` in a job of several processes without `mpidp.init()`.
    """

    def __init__(
        self,
        num_samples: int,
        global_batch: int,
        seed: int = 0,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        world: World | None = None,
    ) -> None:
        super().__init__(world, "mpidp.shares", "shares")
        settings = (num_samples, global_batch, seed, shuffle, drop_last)
        check_agreed(self.world, settings, "mpidp.shares", "num_samples, global_batch, seed, shuffle, drop_last")
        if not 0 < global_batch <= num_samples:
            raise DataError(
                f"global_batch is {global_batch}, and there are {num_samples} samples; give at least 1 and at most that"
            )
        chunk_rows = np.array([num_samples], dtype=np.int64)
        self.order = Order(chunk_rows, seed, 1, 1, global_batch, "full" if shuffle else "none", drop_last)
        self._may_begin = False

    def __iter__(self) -> Iterator[list[int]]:
        if not self._may_begin:
            raise DataError(
                "a DataLoader over mpidp.shares was iterated by itself, which does not tell what was trained on; write "
                "`for share, batch in shares.steps(loader):`"
            )
        return self._batches(self.order.plan(self._epoch), self._rest())

    def steps(self, loader: Iterable[T]) -> Iterator[tuple[Batch, T]]:
        """Yield (share, batch) for each step to the end of the epoch. Not collective.

        Args:
            loader: a DataLoader with these shares as its `batch_sampler`.

        Yields:
            share: this rank's share of the step, a `Batch` without fields: `share.weigh(loss)`, `share.size`,
                `share.global_size` and `share.indices`.
            batch: what the loader returned for these samples. Where `share.size` is 0, it holds one sample of the
                step in their place: `weigh` gives it no weight, and a metric must leave it out.

        Raises:
            DataError: another batch sampler, or one whose batches do not come in order.
        """
        if getattr(loader, "batch_sampler", None) is not self or not getattr(loader, "in_order", True):
            raise DataError(
                "shares.steps was given another loader; give DataLoader(dataset, batch_sampler=shares), without "
                "in_order=False"
            )
        this = self._begin_pass()
        coming = self._rest()
        batches = self._begin(loader)
        for step, rows in coming:
            self._check_pass(this)
            batch = next(batches)
            self._position = step.stop
            yield Batch({}, rows, step.stop - step.start, self.world, (self._epoch, step.stop)), batch
        if self._pass is this:
            self._finish_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return the position: epoch, global samples handed out, and all that the order depends on. Not collective."""
        return self._state("seed", "shuffle", "global_batch")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken: exactly its unseen samples follow, at any number of ranks. Not collective.

        The seed of `state` is adopted. Another global batch is fine.

        Raises:
            DataError: the state of other data or another shuffle, or one that is damaged.
        """
        here = self.state_dict()
        missing = here.keys() - state.keys()
        if missing:
            raise DataError(f"the state lacks {', '.join(sorted(missing))}; it is not one of mpidp.shares")
        order = replace(self.order, seed=state["seed"])
        self._take_position(state, {name: here[name] for name in ("num_samples", "shuffle")}, state["position"])
        self.order = order

    def _rest(self) -> Iterator[tuple[Step, IntArray]]:
        """Return the steps of the epoch from the position on, with this rank's samples."""
        share = Share(self._epoch, self._position, self.world.size, self.world.rank)
        return islice(step_rows(self.order, share), self.remaining_steps)

    @staticmethod
    def _batches(plan: EpochPlan, rest: Iterator[tuple[Step, IntArray]]) -> Iterator[list[int]]:
        for step, rows in rest:
            # Nothing can be collated of no samples: one of this step stands in, and has no weight.
            yield (rows if len(rows) else plan.rows(np.array([step.start]))).tolist()

    def _begin(self, loader: Iterable[T]) -> Iterator[T]:
        """Let a DataLoader, which now asks for the samples, begin a pass."""
        self._may_begin = True
        try:
            return iter(loader)
        finally:
            self._may_begin = False


shares = Shares
