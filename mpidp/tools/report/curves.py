"""The curves of a report: values over the steps, events, and the time of a step by phase."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from mpidp.printable import visible
from mpidp.tools.report.report import Run, Series


@dataclass(frozen=True)
class Curve:
    """One line of a panel.

    Attributes:
        run: index of its run.
        what: which of a run's lines in this panel it is, in a word.
        number: the same as an index.
        series: what is drawn, in the panel's unit.
        is_evaluation: whether its points are far apart, one an epoch.
    """

    run: int
    what: str
    number: int
    series: Series
    is_evaluation: bool


@dataclass(frozen=True)
class Panel:
    """One pair of axes, and a row of the table of numbers for each curve.

    Attributes:
        title: what is shown.
        label: of the vertical axis, with its unit.
        curves: at least one.
        from_zero: whether the vertical axis begins at 0.
        may_be_log: whether a logarithmic axis suits values of several orders of magnitude.
        style: format of a value in tables.
    """

    title: str
    label: str
    curves: tuple[Curve, ...]
    from_zero: bool = False
    may_be_log: bool = False
    style: str = ".5g"


@dataclass(frozen=True)
class Event:
    """Something that marks the curves of a run.

    Attributes:
        step: optimizer steps done before it.
        kind: "restart" or "ranks lost".
        text: what happened.
    """

    step: int
    kind: str
    text: str


# Kind and key of a record, the curve's name in its panel, and the factor to the panel's unit.
_Source = tuple[str, str, str, float]
_PANELS: tuple[tuple[Panel, tuple[_Source, ...]], ...] = (
    (
        Panel("Loss", "loss", (), may_be_log=True),
        (("train", "loss", "training", 1), ("validation", "loss", "held out", 1)),
    ),
    (
        Panel("Accuracy", "accuracy (%)", (), style=".2f"),
        (("train", "accuracy", "training", 100), ("validation", "accuracy", "held out", 100)),
    ),
    (Panel("Learning rate", "learning rate", (), from_zero=True), (("train", "lr", "first parameter group", 1),)),
    (
        Panel("Speed", "samples/s, all ranks", (), from_zero=True, style=",.1f"),
        (("train", "samples_per_s", "training", 1),),
    ),
    (
        Panel("Memory of rank 0", "peak so far (GiB)", (), from_zero=True, style=".3f"),
        (
            ("train", "memory_bytes.host", "host", 2**-30),
            ("train", "memory_bytes.device", "GPU, held by torch", 2**-30),
        ),
    ),
)


def panels(runs: Sequence[Run]) -> list[Panel]:
    """The panels for which any run has recorded something."""
    made = []
    for panel, sources in _PANELS:
        curves = tuple(
            Curve(index, what, number, _scaled(series, factor), kind == "validation")
            for index, run in enumerate(runs)
            for number, (kind, key, what, factor) in enumerate(sources)
            if (series := run.series(kind, key)) is not None
        )
        if curves:
            made.append(dataclasses.replace(panel, curves=curves))
    return made


def events(run: Run) -> list[Event]:
    """Restarts and losses of ranks, in the order of their steps."""
    found = []
    for number, start in enumerate(run.starts[1:], start=1):
        if isinstance(step := start.get("first_step"), int):
            ranks, nodes = start.get("ranks", "?"), start.get("nodes", "?")
            text = f"started again on {_count(ranks, 'rank')}, {_count(nodes, 'node')}; before: {run.end(number - 1)}"
            found.append(Event(step, "restart", text))
    for record in run.records.get("loss_of_ranks", []):
        lost = [f"rank {one.get('rank', '?')} ({one.get('host', '?')})" for one in record.get("lost", [])]
        text = f"lost {', '.join(lost) or 'ranks'}; {_count(record.get('ranks', '?'), 'rank')} went on"
        took_s = record.get("lost_s")
        found.append(Event(record["step"], "ranks lost", text + (f" after {took_s:.3g} s" if took_s else "")))
    return sorted(found, key=lambda event: event.step)


def gaps(run: Run) -> list[str]:
    """A sentence for each quantity that was not finite, and for each record that is damaged."""
    said = []
    for kind in ("train", "validation"):
        for key in ("loss", "accuracy", "lr", "samples_per_s"):
            records = [record for record in run.records.get(kind, []) if key in record]
            steps = [record["step"] for record in records if record[key] is None]
            if steps:
                said.append(
                    f"{run.label}: {key} of {len(steps):,} of {len(records):,} records of kind {kind} was not finite "
                    f"(NaN or infinite), first at step {steps[0]:,}; the curve has gaps there."
                )
    return [*said, *(f"{run.label}: {text}." for text in run.damaged)]


def _count(number: object, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _scaled(series: Series, factor: float) -> Series:
    return series if factor == 1 else Series(series.steps, [value * factor for value in series.values])


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
