"""Work done enters, lines on the standard error leave: a bar on a terminal, otherwise one line an interval.

The standard output stays free for results, which may be JSON.
"""

import sys
import time
from types import TracebackType
from typing import Any

from mpidp.tools.table import size_text

INTERVAL_S = 10.0


class Ticker:
    """Shows how many bytes of a total are done, as a context manager.

    Args:
        what: the verb in front, such as "verifying".
        total_bytes: all of them.
        speaks: whether this process shows anything.
        interval_s: seconds between two lines where there is no terminal.
    """

    def __init__(self, what: str, total_bytes: int, speaks: bool = True, interval_s: float = INTERVAL_S) -> None:
        self._what, self._total_bytes, self._interval_s, self._speaks = what, total_bytes, interval_s, speaks
        self._done_bytes = 0
        self._start = self._last_line = time.monotonic()
        self._bar = _rich_bar(what, total_bytes) if speaks and sys.stderr.isatty() else None

    def __enter__(self) -> "Ticker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, num_bytes: int) -> None:
        """Count bytes as done, and show it when it is time."""
        self._done_bytes += num_bytes
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done_bytes)
            return
        now = time.monotonic()
        if not self._speaks or now - self._last_line < self._interval_s or not self._done_bytes:
            return
        self._last_line = now
        left_s = (now - self._start) / self._done_bytes * (self._total_bytes - self._done_bytes)
        done = f"{size_text(self._done_bytes)} of {size_text(self._total_bytes)}"
        print(f"mpidp: {self._what}: {done}, {left_s:,.0f} s left", file=sys.stderr, flush=True)


def _rich_bar(what: str, total_bytes: int) -> Any:
    """A running progress bar; None where the package rich (extra `progress`) is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return None
    columns = (TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task(what, total=total_bytes)
    bar.start()
    return bar
