"""The seconds by phase that a run recorded enter, their sums, and means over groups of steps to draw, leave."""

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from mpidp.printable import visible
from mpidp.tools.report.run import Run

# More columns than this are not seen apart in a figure.
_MOST_COLUMNS = 400
# A step that is slower than the usual one by this factor would squeeze all others into a line at the bottom.
_HIGHEST = 4.0
# A run records seven; a file of foreign origin could name any number.
_MOST_PHASES = 32


@dataclass(frozen=True)
class Phases:
    """Where rank 0's time in steps went.

    Attributes:
        names: of the phases, in the order of their first record.
        total_s: seconds of each phase, over all recorded steps.
        num_steps: how many steps that were.
        edges: steps done at the edges of the columns to draw; one more than columns.
        means_ms: of each column, milliseconds of a step by phase; NaN where nothing is recorded.
        ceiling_ms: where the figure ends.
        cut: how many columns are higher than that.
    """

    names: tuple[str, ...]
    total_s: tuple[float, ...]
    num_steps: int
    edges: list[int]
    means_ms: list[list[float]]
    ceiling_ms: float
    cut: int


def phases_of(run: Run) -> Phases | None:
    """The phases of a run; None if it has recorded none."""
    intervals = [(before, step, seconds) for before, step, seconds in run.intervals() if seconds and step > before]
    names = tuple(dict.fromkeys(name for *_, seconds in intervals for name in seconds))[:_MOST_PHASES]
    if not names:
        return None
    columns = _columns(intervals, names)
    sums_ms = [sum(means) for _, _, means in columns]
    usual_ms = median(sums_ms)
    is_far_off = max(sums_ms) > _HIGHEST * usual_ms > 0
    ceiling_ms = _HIGHEST * usual_ms if is_far_off else 1.05 * max(sums_ms)
    edges, means_ms = _without_holes(columns, len(names))
    return Phases(
        names=tuple(map(visible, names)),  # SVG cannot hold control characters
        total_s=tuple(math.fsum(seconds.get(name, 0.0) for *_, seconds in intervals) for name in names),
        num_steps=sum(step - before for before, step, _ in intervals),
        edges=edges,
        means_ms=means_ms,
        ceiling_ms=ceiling_ms or 1.0,
        cut=sum(value > ceiling_ms for value in sums_ms),
    )


_Column = tuple[int, int, list[float]]


def _columns(intervals: list[tuple[int, int, dict[str, float]]], names: tuple[str, ...]) -> list[_Column]:
    """First and last step, and mean milliseconds of a step by phase, of so many neighbours that few columns remain."""
    size = math.ceil(len(intervals) / _MOST_COLUMNS)
    columns = []
    for start in range(0, len(intervals), size):
        group = intervals[start : start + size]
        steps = sum(step - before for before, step, _ in group)
        means = [1e3 * math.fsum(seconds.get(name, 0.0) for *_, seconds in group) / steps for name in names]
        columns.append((group[0][0], group[-1][1], means))
    return columns


def _without_holes(columns: list[_Column], num_names: int) -> tuple[list[int], list[list[float]]]:
    """Edges that follow each other; a column of NaN where nothing is recorded of steps in between."""
    edges, means_ms = [columns[0][0], columns[0][1]], [columns[0][2]]
    for (_, end, _), (start, last, means) in pairwise(columns):
        if start > end:
            edges.append(start)
            means_ms.append([math.nan] * num_names)
        edges.append(last)
        means_ms.append(means)
    return edges, means_ms
