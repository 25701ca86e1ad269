"""The tables of a report: the runs, their starts and settings, and all measured numbers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from mpidp.tools.report.curves import Event, Panel, Phases
from mpidp.tools.report.report import RankTime, Run
from mpidp.tools.table import size_text

UNKNOWN = "not recorded"
_MOST_HOSTS = 16


@dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
        caption: what it holds; of one line.
        header: of each column.
        rows: of cells; the first one names its row.
    """

    caption: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def facts(runs: Sequence[Run]) -> Table:
    """What was run, a column for each run."""
    rows: list[tuple[str, ...]] = [(name, *(say(run) for run in runs)) for name, say in _FACTS.items()]
    packages = dict.fromkeys(name for run in runs for start in run.starts for name in start.get("packages", {}))
    rows += [(package, *(_over_starts(run, partial(_version, package)) for run in runs)) for package in packages]
    return Table("What was run", ("", *(run.label for run in runs)), rows)


def starts(runs: Sequence[Run]) -> Table:
    """Every start of every run, and why it ended."""
    rows: list[tuple[str, ...]] = []
    for run in runs:
        for number, start in enumerate(run.starts):
            keys = ("time", "first_step", "ranks", "nodes", "device", "slurm_job_id")
            rows.append(
                (run.label, str(number + 1), *(_text(start.get(key, UNKNOWN)) for key in keys), run.end(number))
            )
    header = ("run", "start", "time", "from step", "ranks", "nodes", "device of rank 0", "Slurm job", "ended")
    return Table("Starts", header, rows)


def differences(runs: Sequence[Run]) -> Table:
    """The settings that are not the same in all runs."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    rows: list[tuple[str, ...]] = []
    for key in keys:
        values = [_text(run.config[key]) if key in run.config else "not set" for run in runs]
        if len(set(values)) > 1:
            rows.append((key, *values))
    return Table("Settings that differ", ("setting", *(run.label for run in runs)), rows)


def _over_starts(run: Run, get: Callable[[dict[str, Any]], object]) -> str:
    """What every start of a run says, once; or one after the other, where it changed."""
    return ", then ".join(said for said, _ in groupby(_text(get(start)) for start in run.starts))


def _version(package: str, start: dict[str, Any]) -> object:
    return start.get("packages", {}).get(package, UNKNOWN)


def _setting(run: Run, key: str) -> str:
    return _text(run.config.get(key, UNKNOWN))


def _of_starts(key: str) -> Callable[[Run], str]:
    return lambda run: _over_starts(run, lambda start: start.get(key, UNKNOWN))


def _text(value: object) -> str:
    """A value of TOML or JSON as a reader wants it."""
    match value:
        case bool():
            return "true" if value else "false"
        case list():
            return ", ".join(map(_text, value)) or "none"
        case None | "":
            return "none"
    return str(value)


def _named(section: str) -> Callable[[Run], str]:
    """The name that a section of the configuration gives, and its keyword arguments."""

    def say(run: Run) -> str:
        start = f"{section}.arguments."
        given = [f"{key[len(start) :]} = {_text(value)}" for key, value in run.config.items() if key.startswith(start)]
        if section == "optimizer":
            given.insert(0, f"lr = {_setting(run, 'optimizer.lr')}")
        return ", ".join([_setting(run, f"{section}.name"), *given])

    return say


def _held_out(run: Run) -> str:
    fraction = run.config.get("data.validation_fraction")
    return f"{fraction:.4g} of the training samples" if fraction else _setting(run, "data.validation")


def _steps(run: Run) -> str:
    total = run.starts[-1].get("last_step")
    return f"{run.last_step:,}" + (f" of {total:,}" if isinstance(total, int) else "")


def _samples(run: Run) -> str:
    return f"{sum(record.get('samples', 0) for record in run.records['train']):,}"


def _hosts(run: Run) -> str:
    return _over_starts(run, lambda start: _some(sorted(set(start.get("hosts") or []))) or UNKNOWN)


def _some(names: list[str]) -> list[str]:
    """All names, or the first and the last of many."""
    return names if len(names) <= _MOST_HOSTS else [*names[:3], f"... {len(names) - 4:,} more ...", names[-1]]


def _num_starts(run: Run) -> str:
    again = len(run.starts) - 1
    return f"{again + 1}" + (f" ({again} restart{'' if again == 1 else 's'})" if again else "")


_FACTS: dict[str, Callable[[Run], str]] = {
    "folder": lambda run: str(run.path),
    "model": _named("model"),
    "loss": _named("loss"),
    "optimizer": _named("optimizer"),
    "schedule": _named("scheduler"),
    "training data": lambda run: _setting(run, "data.train"),
    "held-out data": _held_out,
    "samples of a step, all ranks": lambda run: _setting(run, "data.global_batch"),
    "epochs asked for": lambda run: _setting(run, "train.epochs"),
    "steps done": _steps,
    "samples trained on": _samples,
    "ranks": _of_starts("ranks"),
    "nodes": _of_starts("nodes"),
    "hosts": _hosts,
    "device of rank 0": _of_starts("device"),
    "threads of a rank": _of_starts("threads"),
    "launcher": _of_starts("launcher"),
    "first start": lambda run: _text(run.starts[0].get("time", UNKNOWN)),
    "starts": _num_starts,
    "end": lambda run: run.end(len(run.starts) - 1),
    "mpidp": _of_starts("mpidp"),
    "Python": _of_starts("python"),
    "MPI": _of_starts("mpi"),
}


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
    if not run.trace:
        return None
    names = tuple(dict.fromkeys(name for rank in run.trace for name in rank.phases_s))
    rows: list[tuple[str, ...]] = []
    for rank in run.trace:
        seconds = (*(rank.phases_s.get(name, 0.0) for name in names), rank.waiting_s, rank.own_s)
        rows.append((f"{rank.rank}", f"{rank.steps:,}", *(_mean_ms(rank, value) for value in seconds)))
    slowest = max(run.trace, key=lambda rank: rank.own_s / rank.steps)
    caption = (
        f"{run.label}: milliseconds of a step by rank, from trace.json. Rank {slowest.rank} is the slowest by itself: "
        f"{_mean_ms(slowest, slowest.own_s)} ms a step without reducing and without waiting for other ranks"
    )
    return Table(caption, ("rank", "steps traced", *names, "waiting for ranks", "by itself"), rows)


def _mean_ms(rank: RankTime, seconds: float) -> str:
    return f"{1e3 * seconds / rank.steps:,.3f}"


def without(table: Table, column: str) -> Table:
    """The table without one of its columns, if it has it."""
    if column not in table.header:
        return table
    place = table.header.index(column)
    header, *rows = ((*row[:place], *row[place + 1 :]) for row in (table.header, *table.rows))
    return Table(table.caption, header, rows)
