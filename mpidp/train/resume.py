"""The newest checkpoint of a folder, taken into a training."""

from pathlib import Path
from typing import Any

from mpidp.train.checkpoint.read import STATE, newest_readable, part_name, read
from mpidp.train.state import TrainState


def restore(state: TrainState, folder: Path, *, accept_changed: bool = False) -> tuple[dict[str, Any], Path]:
    """Takes the newest checkpoint that all ranks can read. Collective.

    Args:
        state: the training.
        folder: where the checkpoints are.
        accept_changed: begin the epoch anew where the files hold other data.

    Returns:
        What the checkpoint holds for all ranks, and its path.

    Raises:
        CheckpointError: no usable checkpoint; one of another model, optimizer or scheduler.
        DataError: one of other data.
    """
    world = state.world
    path, passed_over = newest_readable(world, folder)
    for line in passed_over:
        world.log_once(f"passed over a newer checkpoint: {line}; the next save sets it aside")
    with world.raise_on_all_ranks("loading the checkpoint"):
        saved = read(path, STATE)
    state.load_state_dict(
        saved,
        of_rank=lambda rank: read(path, part_name(rank)),
        source=f"checkpoint {path}",
        accept_changed=accept_changed,
    )
    world.log_once(f"resumed from {path}: step {state.step:,}, epoch {state.epoch + 1}")
    return saved, path
