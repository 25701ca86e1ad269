"""Runs enter, the tables of what was run leave: facts side by side, starts, settings that differ."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from mpidp.tools.report.run import Run

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
