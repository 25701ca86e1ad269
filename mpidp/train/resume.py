"""A trainer in, its whole state in a checkpoint out; and back, so that the run goes on as if it had not stopped."""

import tomllib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpidp.config import RunConfig, to_toml
from mpidp.errors import CheckpointError
from mpidp.train import rng
from mpidp.train.checkpoint import read as checkpoint
from mpidp.train.checkpoint.read import newest_readable
from mpidp.train.checkpoint.saver import Saver
from mpidp.train.records.run_folder import RunFolder
from mpidp.train.sharded import keep

if TYPE_CHECKING:
    from mpidp.train.trainer import Trainer


def make_saver(trainer: "Trainer", newest: Path | None) -> Saver:
    """What writes the checkpoints of a run as its configuration wants it. Collective.

    Args:
        trainer: the run; its folder is there.
        newest: the checkpoint that it continues.
    """
    section = trainer.config.checkpoint
    return Saver(
        trainer.world,
        trainer.folder.checkpoints,
        section.keep,
        background=section.background,
        on_failure=section.on_failure,
        newest=newest,
        relies_on=(trainer.folder.config, trainer.folder.metrics),
    )


def save(trainer: "Trainer") -> None:
    """Begins a checkpoint: rank 0 writes what all share, every rank what it alone has. Collective.

    Raises:
        CheckpointError: as `Saver.save` does; and if another job has taken the run folder meanwhile.
    """
    trainer.folder.check_owned(trainer.world)
    trainer.saver.save(trainer.step, partial(_state, trainer), partial(_own_state, trainer))


def restore(trainer: "Trainer", run_folder: Path) -> tuple[int, Path]:
    """Takes the state of a run's newest checkpoint that all ranks can read. Collective.

    The same number of ranks continues bit for bit. With another number the samples are the same, and random streams
    (dropout) start anew, repeatably.

    Returns:
        The length of the metrics file at that time, and the checkpoint.

    Raises:
        CheckpointError: no run folder or usable checkpoint; one of another model, optimizer or scheduler.
    """
    world = trainer.world
    with world.raise_on_all_ranks("looking for the run folder"):
        RunFolder(run_folder).check()
    path, passed_over = newest_readable(world, RunFolder(run_folder).checkpoints)
    for line in passed_over:
        world.log_once(f"passed over a newer checkpoint: {line}; the next save sets it aside")
    with world.raise_on_all_ranks("loading the checkpoint"):
        state = checkpoint.read(path, checkpoint.STATE)
        _apply(trainer, state, path)
    trainer.step = state["step"]
    _restore_own(trainer, path, state["ranks"])
    world.log_once(f"resumed from {path}: step {trainer.step:,}, epoch {trainer.loader.epoch + 1}")
    ignored = _ignored(trainer.config, state["config"])
    if ignored:
        world.log_once(f"changed since, but the checkpoint's values go on: {', '.join(ignored)}")
    return int(state["metrics_bytes"]), path


def _restore_own(trainer: "Trainer", path: Path, saved_ranks: int) -> None:
    """Takes what each rank alone has, where there are as many ranks as then; collective."""
    world = trainer.world
    if saved_ranks != world.size:
        rng.seed_all(trainer.config.run.seed, world.rank, trainer.step)
        kept = not trainer.config.reduce.error_feedback
    else:
        with world.raise_on_all_ranks("loading the checkpoint"):
            own = checkpoint.read(path, checkpoint.part_name(world.rank))
            rng.restore(own["rng"], world.device)
            kept = trainer.model.load_rank_state_dict(own["reduction"]) or not trainer.config.reduce.error_feedback
    if not world.all(kept):
        world.log_once(
            "error feedback starts from nothing: the checkpoint's rounding errors belong to another number or "
            "layout of ranks, or to another way of reducing"
        )


def _ignored(config: RunConfig, saved: str) -> list[str]:
    """Settings of optimizer and scheduler that differ from the checkpoint's, which are part of their saved state."""
    before, now = tomllib.loads(saved), tomllib.loads(to_toml(config))
    return [
        f"{section}.{key}"
        for section in ("optimizer", "scheduler")
        for key in sorted({*before[section], *now[section]})
        if before[section].get(key) != now[section].get(key) and key != "sharded"
    ]


def _state(trainer: "Trainer") -> dict[str, Any]:
    return {
        "classes": _classes(trainer),
        "model": trainer.model.state_dict(),
        "optimizer": keep.shared_state(trainer.optimizer),
        "scheduler": trainer.scheduler.state_dict() if trainer.scheduler else None,
        "loader": trainer.loader.state_dict(),
        "step": trainer.step,
        "ranks": trainer.world.size,
        "metrics_bytes": trainer.recorder.num_bytes,
        "config": to_toml(trainer.config),
    }


def _own_state(trainer: "Trainer") -> dict[str, Any]:
    return {
        "rng": rng.capture(trainer.world.device),
        "reduction": trainer.model.rank_state_dict(),
        "optimizer": keep.own_state(trainer.optimizer),
    }


def _apply(trainer: "Trainer", state: dict[str, Any], path: Path) -> None:
    checkpoint.check_model(trainer.model.state_dict(), state["model"], path)
    trainer.model.load_state_dict(state["model"])
    # Torch itself takes the state of one class into another, and fails later or goes on wrongly.
    for part, here in _classes(trainer).items():
        if state["classes"][part] != here:
            raise CheckpointError(
                f"checkpoint {path} was made with {part} {state['classes'][part]}, this run has {here}. "
                f"Resume with the same, or start a new run."
            )
    try:
        keep.restore(trainer.optimizer, state["optimizer"], partial(checkpoint.read_shard, path))
        if trainer.scheduler:
            trainer.scheduler.load_state_dict(state["scheduler"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} was made with another optimizer or scheduler: {error}") from error
    trainer.loader.load_state_dict(state["loader"], accept_changed=trainer.config.data.accept_changed)


def _classes(trainer: "Trainer") -> dict[str, str]:
    """Names of the classes whose state a checkpoint holds."""
    scheduler = trainer.scheduler
    return {
        "optimizer": keep.kind(trainer.optimizer),
        "scheduler": "none" if scheduler is None else type(scheduler).__qualname__,
    }
