"""Runs and their panels enter, the tables of what was measured leave: curves in numbers, phases, checkpoints, ranks."""

import math
from collections.abc import Sequence

from mpidp.tools.report.curves import Event, Panel
from mpidp.tools.report.facts import Table
from mpidp.tools.report.phases import Phases
from mpidp.tools.report.run import Run
from mpidp.tools.report.trace import RankTime
from mpidp.tools.table import size_text


def numbers(panels: Sequence[Panel], runs: Sequence[Run]) -> Table:
    """Each curve in numbers: the first, the last, the least and the greatest, with the steps of these."""
    rows: list[tuple[str, ...]] = []
    for panel in panels:
        for curve in panel.curves:
            name = (f"{panel.label}: {curve.what}", runs[curve.run].label)
            points = curve.series.finite
            if not points:
                rows.append((*name, *("none finite",) * 4))
                continue
            ends = (points[0], points[-1])
            least, greatest = (choose(points, key=lambda point: point[1]) for choose in (min, max))
            cells = (f"{value:{panel.style}} at step {step:,}" for step, value in (*ends, least, greatest))
            rows.append((*name, *cells))
    return Table("The curves in numbers", ("", "run", "first", "last", "least", "greatest"), rows)


def phases(found: Sequence[tuple[Run, Phases]]) -> Table:
    """The recorded seconds of each phase, and its share of them."""
    rows: list[tuple[str, ...]] = []
    for run, of_run in found:
        all_s = math.fsum(of_run.total_s)
        for name, total_s in (*zip(of_run.names, of_run.total_s, strict=True), ("all phases", all_s)):
            share = f"{100 * total_s / all_s:.1f}" if all_s else "-"
            rows.append((name, run.label, f"{total_s:,.3f}", share, f"{1e3 * total_s / of_run.num_steps:,.3f}"))
    header = ("phase", "run", "total (s)", "share (%)", "mean of a step (ms)")
    return Table("Time of rank 0 by phase", header, rows)


def events(found: Sequence[tuple[Run, Sequence[Event]]]) -> Table:
    """What the vertical lines in the curves stand for."""
    rows: list[tuple[str, ...]] = []
    for run, of_run in found:
        rows += [(run.label, f"{event.step:,}", event.kind, event.text) for event in of_run]
    return Table("Restarts and lost ranks", ("run", "after step", "what", "more"), rows)


def checkpoints(runs: Sequence[Run]) -> Table:
    """The checkpoints that are kept, as their manifests describe them."""
    rows: list[tuple[str, ...]] = []
    for run in runs:
        for name, manifest in run.checkpoints:
            if isinstance(manifest, str):
                rows.append((run.label, name, "?", "?", "?", "?", manifest))
            else:
                size = f"{manifest.num_bytes:,} bytes ({size_text(manifest.num_bytes)})"
                rows.append((run.label, name, f"{manifest.step:,}", size, manifest.saved_at, str(manifest.ranks), ""))
    table = Table("Checkpoints", ("run", "checkpoint", "step", "size", "saved", "ranks", "what is wrong"), rows)
    return table if any(row[-1] for row in rows) else without(table, "what is wrong")


def ranks(run: Run) -> Table | None:
    """The mean time of each phase per step and rank, from the run's trace; None without one that can be used."""
    if run.trace is None or not run.trace.ranks:
        return None
    names = tuple(dict.fromkeys(name for rank in run.trace.ranks for name in rank.phases_s))
    rows = [_rank_row(rank, names) for rank in run.trace.ranks]
    slowest = run.trace.slowest
    caption = (
        f"{run.label}: milliseconds of a step by rank, from trace.json. Rank {slowest.rank} is the slowest by itself: "
        f"{_mean_ms(slowest, slowest.own_s)} ms a step without reducing and without waiting for other ranks"
    )
    return Table(caption, ("rank", "steps traced", *names, "waiting for ranks", "by itself"), rows)


def _rank_row(rank: RankTime, names: Sequence[str]) -> tuple[str, ...]:
    means = (_mean_ms(rank, rank.phases_s.get(name, 0.0)) for name in names)
    return f"{rank.rank}", f"{rank.steps:,}", *means, _mean_ms(rank, rank.waiting_s), _mean_ms(rank, rank.own_s)


def _mean_ms(rank: RankTime, seconds: float) -> str:
    return f"{1e3 * seconds / rank.steps:,.3f}"


def without(table: Table, column: str) -> Table:
    """The table without one of its columns, if it has it."""
    if column not in table.header:
        return table
    place = table.header.index(column)
    header, *rows = ((*row[:place], *row[place + 1 :]) for row in (table.header, *table.rows))
    return Table(table.caption, header, rows)
