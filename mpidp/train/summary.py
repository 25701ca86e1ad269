"""A trainer in, sentences out: what starts, how each epoch ended, and what came of it."""

from typing import TYPE_CHECKING

import mpidp
from mpidp.train.checkpoint.read import newest_first
from mpidp.train.records.recorder import PHASES
from mpidp.train.records.run_folder import RunFolder

if TYPE_CHECKING:
    from mpidp.train.trainer import Trainer

_NAMES = {
    "data": "waiting for data",
    "forward": "forward",
    "backward": "backward",
    "reduce": "reducing gradients",
    "optimizer": "in the optimizer",
}


def describe_start(trainer: "Trainer") -> str:
    """Who trains what on what, in four lines."""
    world, loader = trainer.world, trainer.loader
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    held_out = f", {trainer.validation.num_samples:,} held out" if trainer.validation else ""
    return (
        f"mpidp {mpidp.__version__}: {count(world.size, 'rank')} on {count(world.num_nodes, 'node')}, "
        f"device {world.device.type}, run folder {trainer.folder.path}\n"
        f"data: {loader.num_samples:,} samples to train{held_out}; {count(len(loader), 'step')} an epoch, "
        f"{loader.order.global_batch} samples a step\n"
        f"reading: {loader.line}\n"
        f"model: {trainer.config.model.name}, {parameters:,} parameters; "
        f"reducer {trainer.model.choice.name} ({trainer.model.choice.reason})"
    )


def describe_epoch(trainer: "Trainer", epoch: int) -> str:
    """One line at the end of an epoch."""
    text = f"epoch {epoch + 1:>3}/{trainer.config.train.epochs}  step {trainer.step:,}"
    result = trainer.recorder.last_validation
    return f"{text}  held out: {_result(result)}" if result else text


def summarise(trainer: "Trainer", elapsed_s: float) -> str:
    """What was done and where the time went, in plain words."""
    steps = trainer.step - trainer.first_step
    if steps == 0:
        return f"Nothing left to train: the run in {trainer.folder.path} has all its epochs."
    recorder = trainer.recorder
    shares = ", ".join(f"{recorder.stopwatch.seconds[phase] / elapsed_s:.0%} {_NAMES[phase]}" for phase in PHASES)
    held_out = f" Held out: {_result(recorder.last_validation)}." if recorder.last_validation else ""
    return (
        f"Trained {count(steps, 'step')} on {count(trainer.world.size, 'rank')} in {elapsed_s:.1f} s, "
        f"{recorder.num_samples / elapsed_s:,.0f} samples/s.{held_out}\n"
        f"Where rank 0's time went: {shares}; the rest in evaluation and checkpoints.\n"
        f"Everything is in {trainer.folder.path}."
    )


def describe_stop(trainer: "Trainer") -> str:
    """Why the run ends before its last step, and how to go on."""
    return (
        f"stopped by {trainer.stopped} after step {trainer.step:,} of {trainer.recorder.progress.last_step:,}; "
        f"the state is saved. Continue with --resume {trainer.folder.path}"
    )


def describe_newest(folder: RunFolder) -> str:
    """What is left of a run that is interrupted, as the end of a sentence. Not collective."""
    found = newest_first(folder.checkpoints)  # one may have got its name since the ranks last spoke of it
    if not found:
        return "; there is no checkpoint yet"
    return f"; the newest checkpoint is {found[0]}. Continue with --resume {folder.path}"


def count(number: int, noun: str) -> str:
    """A number and its noun: "1 rank", "4 ranks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _result(result: dict[str, float]) -> str:
    accuracy = f", accuracy {result['accuracy']:.2%}" if "accuracy" in result else ""
    return f"loss {result['loss']:.4f}{accuracy}"
