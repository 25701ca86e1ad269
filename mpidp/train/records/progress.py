"""Progress of a run on the terminal, by rank 0: a bar or plain lines, and sentences at start and end."""

import logging
import sys
import time
from pathlib import Path
from typing import Any

from mpidp.train.checkpoint.read import newest_first
from mpidp.world.log import discard_output

log = logging.getLogger("mpidp")


class Progress:
    """The progress display of rank 0. A bar is only shown on a terminal, as it would fill the log files of batch jobs.

    Args:
        speaks: whether this rank prints at all.
        first_step, last_step: range of optimizer steps of this start.
        interval_s: seconds between two plain lines.
    """

    def __init__(self, speaks: bool, first_step: int, last_step: int, interval_s: float):
        self.speaks = speaks
        self.first_step = first_step
        self.last_step = last_step
        self.interval_s = interval_s
        self._start = self._last_line = time.monotonic()
        self._bar = _rich_bar(first_step, last_step) if speaks and sys.stdout.isatty() else None

    def line(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if not self.speaks:
            return
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            self._print(text)

    def update(self, step: int, text: str) -> None:
        """Shows how far training is; as a plain line only when the interval has passed."""
        if not self.speaks:
            return
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, description=text)
            return
        now = time.monotonic()
        if now - self._last_line < self.interval_s:
            return
        self._last_line = now
        left_s = (now - self._start) / (step - self.first_step) * (self.last_step - step)
        self.line(f"  step {step:,} of {self.last_step:,}  {text}  {left_s:,.0f} s left")

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _print(self, text: str) -> None:
        try:
            print(text, flush=True)
        except BrokenPipeError:  # `... | head`, or the reader has ended: training must go on
            discard_output()
            log.warning("standard output has no reader any more; training goes on, and the run folder has its records")


def _rich_bar(first_step: int, last_step: int) -> Any:
    """A running progress bar; None where the package rich (extra `progress`) is not installed."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return None
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    bar = Progress(*columns, transient=True)
    bar.add_task("", total=last_step, completed=first_step)
    bar.start()
    return bar


_PHASES = {
    "data": "waiting for data",
    "forward": "forward",
    "backward": "backward",
    "reduce": "reducing gradients",
    "optimizer": "in the optimizer",
}


def describe_epoch(epoch: int, epochs: int, step: int, held_out: dict[str, float] | None) -> str:
    """One line at the end of an epoch."""
    text = f"epoch {epoch + 1:>3}/{epochs}  step {step:,}"
    return f"{text}  held out: {_result(held_out)}" if held_out else text


def summarise(
    steps: int, ranks: int, samples: int, elapsed_s: float, seconds: dict[str, float], held_out: dict[str, float] | None
) -> str:
    """The summary at the end: what was done, and how long each phase took.

    Args:
        steps: of the optimizer since this start; at least 1.
        ranks: how many there are.
        samples: trained on, over all ranks.
        elapsed_s: since the start.
        seconds: that rank 0 spent in each phase.
        held_out: the last evaluation, if any.
    """
    shares = ", ".join(f"{seconds[phase] / elapsed_s:.0%} {name}" for phase, name in _PHASES.items())
    result = f" Held out: {_result(held_out)}." if held_out else ""
    return (
        f"Trained {count(steps, 'step')} on {count(ranks, 'rank')} in {elapsed_s:.1f} s, "
        f"{samples / elapsed_s:,.0f} samples/s.{result}\n"
        f"Where rank 0's time went: {shares}; the rest in evaluation and checkpoints."
    )


def describe_newest(run_folder: Path, checkpoints: Path) -> str:
    """What an interrupted run has saved, as the end of a sentence. Not collective."""
    found = newest_first(checkpoints)  # one may have been published since the ranks last communicated
    if not found:
        return "; there is no checkpoint yet"
    return f"; the newest checkpoint is {found[0]}. Continue with --resume {run_folder}"


def count(number: int, noun: str) -> str:
    """A number and its noun: "1 rank", "4 ranks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _result(result: dict[str, float]) -> str:
    accuracy = f", accuracy {result['accuracy']:.2%}" if "accuracy" in result else ""
    return f"loss {result['loss']:.4f}{accuracy}"
