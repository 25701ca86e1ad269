"""A trainer in, its whole state in a checkpoint out; and back, so that the run goes on as if it had not stopped."""

import logging
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpidp.config import RunConfig, to_toml
from mpidp.errors import CheckpointError
from mpidp.train import checkpoint, rng
from mpidp.train.run_folder import RunFolder

if TYPE_CHECKING:
    from mpidp.train.trainer import Trainer

log = logging.getLogger("mpidp")


def save(trainer: "Trainer") -> None:
    """Writes a checkpoint: rank 0 the file, every rank its random streams into it. Collective."""
    world = trainer.world
    streams = world.comm.gather(rng.capture(world.device))
    with world.together("writing a checkpoint"):
        if world.rank == 0:
            state = {**_state(trainer), "rng": streams}
            keep = trainer.config.checkpoint.keep
            path = checkpoint.save(trainer.folder.checkpoints, trainer.step, state, keep)
            log.info("wrote %s", path)


def restore(trainer: "Trainer", run_folder: Path) -> int:
    """Takes the state of a run's newest usable checkpoint; returns the metrics file's length at that time. Collective.

    The same number of ranks continues bit for bit. With another number the samples are the same, and random streams
    (dropout) start anew, repeatably.

    Raises:
        CheckpointError: no run folder or usable checkpoint; one of another model, optimizer or scheduler.
    """
    world = trainer.world
    path, passed_over = world.from_root(lambda: _newest(RunFolder(run_folder)))
    for line in passed_over:
        world.say(f"passed over a newer checkpoint: {line}")
    with world.together("loading the checkpoint"):
        state = checkpoint.load(path)
        _apply(trainer, state, path)
    trainer.step = state["step"]
    if len(state["rng"]) == world.size:
        rng.restore(state["rng"][world.rank], world.device)
    else:
        rng.seed_all(trainer.config.run.seed, world.rank, trainer.step)
    world.say(f"resumed from {path}: step {trainer.step:,}, epoch {trainer.loader.epoch + 1}")
    ignored = _ignored(trainer.config, state["config"])
    if ignored:
        world.say(f"changed since, but the checkpoint's values go on: {', '.join(ignored)}")
    return int(state["metrics_bytes"])


def _ignored(config: RunConfig, saved: str) -> list[str]:
    """Settings of optimizer and scheduler that differ from the checkpoint's, which are part of their saved state."""
    before, now = tomllib.loads(saved), tomllib.loads(to_toml(config))
    return [
        f"{section}.{key}"
        for section in ("optimizer", "scheduler")
        for key in sorted({*before[section], *now[section]})
        if before[section].get(key) != now[section].get(key)
    ]


def _newest(folder: RunFolder) -> tuple[Path, list[str]]:
    folder.check()
    return checkpoint.newest(folder.checkpoints)


def _state(trainer: "Trainer") -> dict[str, Any]:
    return {
        "classes": _classes(trainer),
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.scheduler.state_dict() if trainer.scheduler else None,
        "loader": trainer.loader.state_dict(),
        "step": trainer.step,
        "metrics_bytes": trainer.recorder.num_bytes,
        "config": to_toml(trainer.config),
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
        trainer.optimizer.load_state_dict(state["optimizer"])
        if trainer.scheduler:
            trainer.scheduler.load_state_dict(state["scheduler"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} was made with another optimizer or scheduler: {error}") from error
    trainer.loader.load_state_dict(state["loader"])


def _classes(trainer: "Trainer") -> dict[str, str]:
    """Names of the classes whose state a checkpoint holds."""
    parts = {"optimizer": trainer.optimizer, "scheduler": trainer.scheduler}
    return {name: "none" if part is None else type(part).__qualname__ for name, part in parts.items()}
