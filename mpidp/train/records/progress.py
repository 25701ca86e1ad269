"""Steps and losses in, lines on the console out: a bar on a terminal, otherwise one plain line an interval."""

import logging
import sys
import time
from typing import Any

from mpidp.world.log import discard_output

log = logging.getLogger("mpidp")


class Progress:
    """What rank 0 shows while training runs. Bars fill the log files of batch jobs, so they need a terminal.

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
        """Prints a line that stays."""
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
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _print(self, text: str) -> None:
        try:
            print(text, flush=True)
        except BrokenPipeError:  # `... | head`, or the end of what was to keep the output: no reason to lose a run
            discard_output()
            log.warning("nobody reads standard output any more; training goes on, and the run folder has its records")


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
