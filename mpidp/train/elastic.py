"""Elastic training: after ranks die, it starts anew on those that are left, from the state in their memory.

A step is taken by all ranks that are left or by none: after the gradients are reduced and before the optimizer changes
anything, all ranks agree that none has died so far. A rank that learns of a death before that has changed nothing, and
takes the step once more with the others; one that learns of it afterwards has taken the step, as all have. So no step
is ever undone.

Everything that was made for a number of ranks (loader, wrapper, optimizer) is dropped then and constructed once more,
as at a start that resumes from a checkpoint; only that the checkpoint lies in memory.
"""

import gc
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from mpidp.errors import SHARED_MARK, LaunchError, MpidpError
from mpidp.printable import listed
from mpidp.train.batch_norm import combine_statistics
from mpidp.train.sharded_optimizer import ShardedOptimizer
from mpidp.train.sharded_state import Part
from mpidp.train.state import TrainState
from mpidp.world.elastic import ElasticWorld, LostRanks, Member
from mpidp.world.mpi import ENDS_MPI, MPI, be_elastic, is_survived, why_not
from mpidp.world.world import World

T = TypeVar("T")
log = logging.getLogger("mpidp.rank")


class Elastic:
    """Lets training go on when ranks die. To be made right after `mpidp.init()`; collective.

    In a loop of your own, make everything that depends on the ranks in a function. When ranks die, it is called again,
    with a World of those that are left:

        elastic = mpidp.Elastic(mpidp.init())

        def train(world):
            loader = mpidp.HDF5Loader("data.h5", fields=("x", "y"), global_batch=64, world=world)
            model = mpidp.DataParallel(Net().to(world.device), world)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            state = mpidp.TrainState(model, optimizer, loader)
            elastic.restore(state)      # after a loss: what the ranks that are left have in memory
            while loader.epoch < 5:
                for batch in loader:
                    loss = batch.weigh(F.cross_entropy(model(batch.x), batch.y))
                    loss.backward()
                    elastic.agree()     # before anything changes
                    optimizer.step()
                    optimizer.zero_grad()
                    state.step += 1

        elastic.run(train)

    From `agree` until the step is counted there must be no collective but the optimizer's step. A death before the
    first `restore` ends the job.

    Attributes:
        world: the ranks that are left.
        is_on: whether this MPI can go on without a rank; if not, the death of a rank ends the job.
        lost_ranks: those that died last, all between the same two steps; None as long as none has died.

    Args:
        world: the ranks.
        min_ranks: with fewer ranks the job ends.
    """

    def __init__(self, world: World, min_ranks: int = 1):
        self.world = world
        self.min_ranks = min_ranks
        self.lost_ranks: LostRanks | None = None
        reason = why_not(os.environ, MPI.Get_library_version(), ENDS_MPI)
        self.is_on = world.size > 1 and world.all(not reason)
        if self.is_on:
            be_elastic()
        elif world.size > 1:
            world.log_once(
                f"training cannot go on without a rank that dies: {reason or 'another rank cannot'}. The job ends "
                f"then, and goes on from its newest checkpoint when it is started again."
            )
        self._ranks = ElasticWorld(world)
        self._state: TrainState | None = None
        self._agreed: _Agreed | None = None
        self._held: _Held | None = None
        self._lost: list[Member] = []  # since the last step that all agreed to take
        self._lost_at = 0.0

    @property
    def goes_on(self) -> bool:
        """Whether ranks were lost and no step has been taken since; the same on all ranks in each call of `train`."""
        return self._held is not None

    def run(self, train: Callable[[World], T]) -> T:
        """Calls `train` until it ends without the loss of a rank; returns what it returns. Collective.

        Args:
            train: makes what it needs, calls `restore`, and trains to the end. Nothing else may hold what it made.

        Raises:
            LaunchError: on all ranks, fewer than `min_ranks` are left.
        """
        while True:
            try:
                return train(self.world)
            except Exception as error:
                if not is_survived(error) or (self._state is None and self._held is None):
                    raise
                log.info("a rank was lost: %s", error)
            self._shrink()

    def restore(self, state: TrainState) -> bool:
        """Loads the state of the last step before ranks were lost into new objects. Collective.

        To be called once in each call of `train`, after everything is made and before the first step. In the first
        call it changes nothing; load a checkpoint, if any, before it. Running statistics of batch norm are combined
        over the ranks that are left.

        Returns:
            Whether ranks were lost.

        Raises:
            LaunchError: on all ranks, a part of a sharded optimizer's state was on lost ranks only.
        """
        self._state = state
        if self._held is not None:
            self._held = self._held.restored_to(state)
            self._tell()
        self._agreed = _Agreed.of(state) if self.is_on else None
        return self.lost_ranks is not None

    def agree(self) -> None:
        """Returns when all ranks are here: the step may be taken. Collective.

        Samples that the loader has handed out count as trained on from now on.

        Raises:
            mpi4py.MPI.Exception: a rank has died; do not catch it, `run` does.
        """
        if self.is_on:
            self._ranks.agree()
            assert self._state is not None, "Elastic.restore(state) comes before the first step"
            self._held, self._agreed = None, _Agreed.of(self._state)
            self._lost, self._lost_at = [], 0.0

    def _shrink(self) -> None:
        """Makes a World of the ranks that are left, and drops what was made with the former one. Collective."""
        self._lost_at = self._lost_at or time.perf_counter()
        if self._held is None:
            assert self._state is not None and self._agreed is not None
            self._held = _Held.of(self._state, self._agreed)
        self._state = None
        gc.collect()  # ends threads and hooks of what was dropped
        self._lost += self._ranks.shrink()
        self.world = self._ranks.world
        if self.world.size < self.min_ranks:
            left = "1 rank" if self.world.size == 1 else f"{self.world.size} ranks"
            few = LaunchError(f"lost {listed(self._lost)}: only {left} left, and min_ranks is {self.min_ranks}")
            setattr(few, SHARED_MARK, True)
            raise few

    def _tell(self) -> None:
        """Records that all ranks have the state again. Collective."""
        self.world.comm.Barrier()
        self.lost_ranks = LostRanks(tuple(self._lost), self.world.size, time.perf_counter() - self._lost_at)
        log.info("%s; this is rank %d now", self.lost_ranks, self.world.rank)
        self.world.log_once(str(self.lost_ranks))


@dataclass(frozen=True)
class _Agreed:
    """The state that a step changes before all ranks agree to take it, as it was at the last agreement."""

    buffers: dict[str, Tensor]
    num_samples_apart: int
    place: dict[str, int]
    step: int

    @staticmethod
    def of(state: TrainState) -> "_Agreed":
        buffers = {name: buffer.clone() for name, buffer in state.model.named_buffers(remove_duplicate=False)}
        place = {"epoch": state.loader.epoch, "position": state.loader.position}
        return _Agreed(buffers, state.model.num_samples_apart, place, state.step)


@dataclass(frozen=True)
class _Held:
    """What a rank holds of the state of training while ranks are lost; tensors are not copied.

    Attributes:
        saved: the state's `shared_state()`; with a sharded optimizer, parameters of other ranks' shards may be old.
        num_samples_apart: number of samples since running statistics of batch norm were combined.
        parts: this rank's part of a sharded optimizer.
    """

    saved: dict[str, Any]
    num_samples_apart: int
    parts: list[Part]

    @staticmethod
    def of(state: TrainState, agreed: _Agreed) -> "_Held":
        if state.step - agreed.step not in (0, 1):
            raise MpidpError(
                f"step {state.step} follows step {agreed.step} of the last Elastic.agree() or restore(): call agree() "
                f"in every step, and load a checkpoint before restore()"
            )
        state.model.num_samples_apart = 0  # of which it would warn
        saved = state.shared_state()
        buffers = {name: buffer for name, buffer in agreed.buffers.items() if name in saved["model"]}
        saved |= {"model": saved["model"] | buffers, "loader": saved["loader"] | agreed.place}
        parts = state.optimizer.held_parts() if isinstance(state.optimizer, ShardedOptimizer) else []
        return _Held(saved, agreed.num_samples_apart, parts)

    def restored_to(self, state: TrainState) -> "_Held":
        """Loads these values into a new state; returns what to hold until all have taken a step. Collective.

        Another rank may die meanwhile, and with it parts that others had passed on to it: so everything is held.
        """
        world = state.world
        steps: list[int] = world.comm.allgather(self.saved["step"])
        assert len(set(steps)) == 1, f"after a loss ranks are at different steps, {steps}"
        # The state of a sharded optimizer comes after this: each of the others may have a part.
        state.load_state_dict(self.saved, of_rank=lambda rank: {"optimizer": []}, source="the state in memory")
        combine_statistics(state.model.module, world, self.num_samples_apart)
        if not isinstance(state.optimizer, ShardedOptimizer):
            return self
        state.optimizer.collect_parts(self.parts)
        model = self.saved["model"] | dict(state.model.module.named_parameters(remove_duplicate=False))
        return replace(self, saved=self.saved | {"model": model}, parts=[*state.optimizer.held_parts(), *self.parts])
