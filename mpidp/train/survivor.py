"""A trainer some of whose ranks died in; the same trainer, on those that live, at the end of its last step out."""

from typing import TYPE_CHECKING

from mpidp.train import rng
from mpidp.train.checkpoints.checkpoint import folder_name
from mpidp.train.parallel.remembered_reducer import remember
from mpidp.train.sharding.optimizer import ShardedOptimizer

if TYPE_CHECKING:
    from mpidp.train.trainer import Trainer


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
        remember(trainer.model, trainer.folder.path)
        if trainer.config.reduce.error_feedback:
            world.say("error feedback starts from nothing: its rounding errors belong to another number of ranks")
