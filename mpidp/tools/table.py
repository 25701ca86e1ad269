"""Text for terminals: aligned tables, readable sizes, and the progress of long reads and writes."""

import sys
import time
from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[object]], indent: str = "  ") -> str:
    """Lay out rows under a header, columns two spaces apart; numbers to the right, text to the left."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numeric = [all(isinstance(cell, int | float) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for line in cells:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric or [False] * len(widths), strict=True)
        )
        lines.append((indent + "  ".join(padded)).rstrip())
    return "\n".join(lines)


def size_text(num_bytes: float) -> str:
    """Return a byte count with a binary unit and three digits or so: 812 B, 1.5 MiB."""
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = 0
    while num_bytes >= 1024 and power < len(units) - 1:
        num_bytes /= 1024
        power += 1
    return f"{num_bytes:.0f} B" if power == 0 else f"{num_bytes:.1f} {units[power]}"


class Ticker:
    """Prints on standard error how many bytes of a total are done, a line each interval.

    Args:
        what: the verb in front, such as "verifying".
        total_bytes: all of them.
        speaks: whether this process prints.
        interval_s: seconds between two lines.
    """

    def __init__(self, what: str, total_bytes: int, speaks: bool = True, interval_s: float = 10.0) -> None:
        self._what, self._total_bytes, self._speaks, self._interval_s = what, total_bytes, speaks, interval_s
        self._done_bytes = 0
        self._start = self._last_line = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Counts bytes as done, and prints a line if the interval has passed."""
        self._done_bytes += num_bytes
        now = time.monotonic()
        if not self._speaks or now - self._last_line < self._interval_s or not self._done_bytes:
            return
        self._last_line = now
        left_s = (now - self._start) / self._done_bytes * (self._total_bytes - self._done_bytes)
        done = f"{size_text(self._done_bytes)} of {size_text(self._total_bytes)}"
        print(f"mpidp: {self._what}: {done}, {left_s:,.0f} s left", file=sys.stderr, flush=True)
