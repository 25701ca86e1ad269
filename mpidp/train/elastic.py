"""A training that can be begun anew from its last step in; the same training out, when ranks died, on those that live.

A step is taken by all survivors or by none: after the gradients are reduced and before the optimizer changes anything,
all ranks agree that nobody has died so far. Whoever meets a death before that has changed nothing, and takes the step
once more with the others; whoever meets it after has taken the step, as all have. So nothing is ever taken back.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

from mpidp.errors import SHARED_MARK, LaunchError
from mpidp.hdf5.loader import HDF5Loader
from mpidp.printable import listed
from mpidp.train import rng
from mpidp.train.checkpoint.read import folder_name
from mpidp.train.sharded.optimizer import ShardedOptimizer
from mpidp.world import communicators
from mpidp.world.elastic import Loss, Person, Recovery
from mpidp.world.mpi import ENDS_MPI, MPI
from mpidp.world.watchdog import ABORT_S
from mpidp.world.world import World

if TYPE_CHECKING:
    from mpidp.train.trainer import Trainer


T = TypeVar("T")
log = logging.getLogger("mpidp.rank")


class Part(Protocol):
    """What was made for a number of ranks: DataParallel, HDF5Loader, StopSignal, Saver."""

    def rebuild(self) -> object:
        """Goes on with the ranks that `world` has now. Collective; it may be called again before it is through."""


class Survivors:
    """Training goes on when ranks die. To be made right after `mpidp.init()`; collective.

    In a loop of your own, in which `train` takes all the steps from where the loader stands to the last one:

        survivors = mpidp.Survivors(world)
        ...
        def train():
            while loader.epoch < 5:
                for batch in loader:
                    loss = batch.weigh(F.cross_entropy(model(batch.x), batch.y))
                    loss.backward()
                    survivors.agree(loader)     # before anything changes
                    optimizer.step()
                    optimizer.zero_grad()

        survivors.run(train, model, loader)

    Between `agree` and the next call of the loader there must be no collective. `world` is the same object after a
    loss, with another rank and size; what else was made with them must be made anew, by a part with a method
    `rebuild`.

    Attributes:
        is_on: whether it does anything; if not, the death of a rank ends the job.
        loss: the last one; None before the first.

    Args:
        world: the ranks.
        min_ranks: with fewer ranks the job ends.
    """

    def __init__(self, world: World, min_ranks: int = 1):
        self.world = world
        self.min_ranks = min_ranks
        self.loss: Loss | None = None
        reason = communicators.why_not(os.environ, MPI.Get_library_version(), ENDS_MPI)
        self.is_on = world.size > 1 and world.all(not reason)
        if self.is_on:
            communicators.be_elastic()
        elif world.size > 1:
            world.log_once(
                f"training cannot go on without a rank that dies: {reason or 'another rank cannot'}. The job ends "
                f"then, and goes on from its newest checkpoint when it is started again."
            )
        self._recovery = Recovery(world)

    def agree(self, *loaders: HDF5Loader) -> None:
        """Returns when all ranks came here alive: the step may be taken. Collective.

        Args:
            loaders: have handed out what this step is made of, which from now on is done.

        Raises:
            mpi4py.MPI.Exception: a rank has died; to be left to `run`.
        """
        if self.is_on:
            with self.world.status.waiting("Agree", self.world.size):
                self._recovery.agree()
        for loader in loaders:
            loader.keep()

    def run(self, work: Callable[[], T], *parts: Part) -> T:
        """Calls `work` until it ends without the loss of a rank; returns what it returns. Collective.

        Args:
            work: goes on from where training stands.
            parts: what has to be made anew when ranks were lost, in this order.

        Raises:
            LaunchError: fewer than `min_ranks` are left.
        """
        while True:
            try:
                return work()
            except Exception as error:
                if not communicators.is_survived(error):
                    raise
                log.info("a rank was lost: %s", error)
            with self._end_unless_over():
                self._recover(parts)

    @contextmanager
    def _end_unless_over(self) -> Iterator[None]:
        """Ends the job when the block takes too long: there is no watchdog meanwhile, and a rank may hang."""
        world = self.world
        limit_s = ABORT_S if world.watchdog is None else world.watchdog.abort_s
        if not limit_s:
            yield
            return
        timer = threading.Timer(limit_s, _end_job, (world, limit_s))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _recover(self, parts: tuple[Part, ...]) -> None:
        start, lost = time.perf_counter(), list[Person]()
        while True:
            try:
                lost += self._recovery.shrink()
                if self.world.size < self.min_ranks:
                    break
                for part in parts:
                    part.rebuild()
                self.world.comm.Barrier()
                break
            except Exception as error:
                if not communicators.is_survived(error):
                    raise
        self.loss = Loss(tuple(lost), self.world.size, time.perf_counter() - start)
        if self.world.size < self.min_ranks:
            few = LaunchError(
                f"lost {listed(lost)}: {self.world.size} ranks are left, and {self.min_ranks} were asked for"
            )
            setattr(few, SHARED_MARK, True)
            raise few
        log.info("%s; this is rank %d now", self.loss, self.world.rank)
        self.world.log_once(str(self.loss))


def _end_job(world: World, limit_s: float) -> None:
    try:
        world.guard.tell(
            f"{world.guard.tag} a rank was lost, and after {limit_s:g} s (stall_abort_s) the others have not all come "
            f"to go on without it: the job ends."
        )
    finally:
        world.guard.abort(1)


class Survivor:
    """The part of a run that `Survivors` makes anew: all of it that depends on the number of ranks.

    Args:
        trainer: the run.
    """

    def __init__(self, trainer: "Trainer"):
        self._trainer = trainer

    def rebuild(self) -> None:
        """Puts all ranks to the end of the last step that all have taken. Collective.

        Model, optimizer and scheduler are there already, as no rank changes them before all have agreed. Random
        streams of ranks (dropout) start anew, as in a resume on another number of ranks.
        """
        trainer, world = self._trainer, self._trainer.world
        steps: list[int] = world.comm.allgather(trainer.step)
        assert len(set(steps)) == 1, f"the survivors of a loss stand at steps {steps}"
        # Some may have been through with an epoch's evaluation and checkpoint when others were not.
        trainer.num_epochs = min(world.comm.allgather(trainer.num_epochs))
        trainer.model.rebuild()
        if isinstance(trainer.optimizer, ShardedOptimizer):
            trainer.optimizer.rebuild()
        for loader in trainer.loaders():
            loader.rebuild()
        trainer.trace.abandon()
        trainer.stop.rebuild()
        trainer.stopped = ""
        trainer.given_up = max(trainer.given_up, trainer.saver.rebuild())
        is_saved = trainer.saver.newest is not None and trainer.saver.newest.name == folder_name(trainer.step)
        trainer.saved_step = trainer.step if world.all(is_saved) else -1
        rng.seed_all(trainer.config.run.seed, world.rank, trainer.step)
        trainer.folder.take_over(world)
        trainer.recorder.rebuild(trainer.step, trainer.folder.metrics)
        if trainer.config.reduce.error_feedback:
            world.log_once("error feedback starts from nothing: its rounding errors belong to another number of ranks")
