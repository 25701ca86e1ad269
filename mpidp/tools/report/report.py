"""`mpidp report`: read what is recorded in run folders and write a page about it. Needs neither torch nor MPI."""

import json
import math
import os
import tomllib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from mpidp.errors import CheckpointError, ConfigError
from mpidp.options import Arg
from mpidp.tools.status import SILENT_S, of_known_kinds, read_starts, silent_s
from mpidp.tools.table import size_text
from mpidp.train.checkpoint.read import Manifest, newest_first, read_manifest

Record = dict[str, Any]

# The phase that lasts until the slowest rank is there: its length says nothing of the rank that it is of.
_REDUCE = "reduce"


@dataclass(frozen=True)
class RankTime:
    """Where the time of one rank went, in the traced steps.

    Attributes:
        rank: its number.
        steps: how many were traced.
        phases_s: seconds of each phase, of all steps; what is done between steps is left out.
        waiting_s: seconds in which its training thread waited for other ranks, of all steps.
        own_s: seconds in phases, without reducing and waiting, of all steps: what the rank takes by itself.
    """

    rank: int
    steps: int
    phases_s: dict[str, float]
    waiting_s: float
    own_s: float


def read_trace(path: Path) -> tuple[list[RankTime], list[str]]:
    """What the trace of a run says of each rank's time; and what is wrong with it, if it cannot be used."""
    if not path.exists():
        return [], []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return [], [f"trace.json is left out: it cannot be read ({error})"]
    events = content.get("traceEvents") if isinstance(content, dict) else None
    of_ranks: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events if isinstance(events, list) else []:
        if _is_span(event):
            of_ranks[event["pid"]].append(event)
    times = [_rank_time(rank, spans) for rank, spans in sorted(of_ranks.items())]
    found = [time for time in times if time.steps]
    return found, [] if found else ["trace.json is left out: it holds no steps of any rank"]


def _is_span(event: Any) -> bool:
    return (
        isinstance(event, dict)
        and event.get("ph") == "X"
        and event.get("cat") in ("step", "phase", "wait")
        and all(isinstance(event.get(key), int | float) for key in ("ts", "dur"))
        and isinstance(event.get("pid"), int)
    )


def _rank_time(rank: int, events: list[dict[str, Any]]) -> RankTime:
    steps = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event["cat"] == "step")
    training = {event.get("tid") for event in events if event["cat"] == "phase"}  # helper threads wait beside it
    spans = [event for event in events if event["cat"] != "step" and event.get("tid") in training]
    spans = [span for span in spans if _is_within(span, steps)]
    phases_us: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        if span["cat"] == "phase":
            phases_us[str(span.get("name", "?"))] += span["dur"]
    waits = [span for span in spans if span["cat"] == "wait"]
    shared = waits + [span for span in spans if span["cat"] == "phase" and span.get("name") == _REDUCE]
    return RankTime(
        rank=rank,
        steps=len(steps),
        phases_s={name: value / 1e6 for name, value in phases_us.items()},
        waiting_s=_covered_us(waits) / 1e6,
        own_s=(_covered_us(spans) - _covered_us(shared)) / 1e6,
    )


def _is_within(span: dict[str, Any], steps: list[tuple[float, float]]) -> bool:
    """Whether the middle of a span lies in a step, and not in what is done between steps, such as an evaluation."""
    middle = span["ts"] + span["dur"] / 2
    number = bisect_right(steps, middle, key=lambda step: step[0])
    return number > 0 and middle <= steps[number - 1][1]


def _covered_us(spans: Iterable[dict[str, Any]]) -> float:
    """Length of the time that at least one of the spans covers: waits lie within phases, and phases may overlap."""
    covered = 0.0
    reached = float("-inf")
    for start, end in sorted((span["ts"], span["ts"] + span["dur"]) for span in spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


@dataclass(frozen=True)
class Series:
    """One recorded quantity over optimizer steps.

    Attributes:
        steps: optimizer steps done.
        values: as recorded; NaN where the record has null or lacks it.
    """

    steps: list[int]
    values: list[float]

    @property
    def finite(self) -> list[tuple[int, float]]:
        """Step and value of the points that are not gaps."""
        return [(step, value) for step, value in zip(self.steps, self.values, strict=True) if math.isfinite(value)]


@dataclass(frozen=True)
class Run:
    """What a run folder holds.

    Attributes:
        path: the folder.
        label: what the run is called in the report, unlike the others.
        config_text: the effective configuration, TOML.
        starts: the entries of `env.json`; one that says nothing where it is damaged.
        records: of `metrics.jsonl`, in order, by kind; at least one of kind `train`.
        damaged: what is wrong with each record, or line of one, that is left out.
        checkpoints: name, and manifest or what is wrong with it; oldest first.
        trace: what `trace.json` says of each rank's time; empty without one.
        silent_s: seconds since the last sign of life.
    """

    path: Path
    label: str
    config_text: str
    starts: list[dict[str, Any]]
    records: dict[str, list[Record]]
    damaged: list[str]
    checkpoints: list[tuple[str, Manifest | str]]
    trace: list[RankTime]
    silent_s: float

    @cached_property
    def config(self) -> dict[str, Any]:
        """The effective configuration, flat: `{"optimizer.lr": 0.003}`."""
        return dict(_flatten(tomllib.loads(self.config_text), ""))

    @property
    def last_step(self) -> int:
        """Optimizer steps that are recorded."""
        return int(self.records["train"][-1]["step"])

    def series(self, kind: str, key: str) -> Series | None:
        """A quantity of the records of a kind, such as `("train", "memory_bytes.host")`; None if none has it."""
        found = [(record["step"], _look_up(record, key)) for record in self.records.get(kind, [])]
        if all(value is _ABSENT for _, value in found):
            return None
        return Series([step for step, _ in found], [_number(value) for _, value in found])

    def intervals(self) -> Iterator[tuple[int, int, dict[str, float]]]:
        """First step done before, last step, and seconds by phase of each record of training."""
        before = 0
        for record in self.records["all"]:
            if record["kind"] == "train":
                yield before, record["step"], record.get("seconds") or {}
            if record["kind"] in ("train", "loss_of_ranks"):  # of the steps just before a loss nothing is recorded
                before = record["step"]

    def end(self, number: int) -> str:
        """How the start with this number, from 0, ended."""
        said = self.starts[number].get("end")
        if said:
            return str(said)
        if number + 1 < len(self.starts):
            return "without a record of its end: killed, or aborted"
        return "still running" if self.silent_s < SILENT_S else "silent: it hangs, or died without a record of its end"


def read(path: Path, label: str) -> Run:
    """The run in a folder.

    Raises:
        ConfigError: no run folder, one that cannot be read, or one without a record of training.
    """
    if not path.is_dir():
        raise ConfigError(f"{path}: there is no such folder. Give the folder of a run, for example runs/digits.")
    starts, damaged = read_starts(path)
    metrics = path / "metrics.jsonl"
    records, left_out = read_records(metrics)
    if "train" not in records:
        raise ConfigError(
            f"{metrics} holds no record of training yet; there is nothing to report. One is written every "
            f"log.every_steps steps and at the end of an epoch."
        )
    config_text, faults = _read_config(path / "config.toml")
    trace, no_trace = read_trace(path / "trace.json")
    return Run(
        path=path,
        label=label,
        config_text=config_text,
        starts=starts or [{}],
        records=records,
        damaged=[*damaged, *left_out, *faults, *no_trace],
        checkpoints=[(found.name, _manifest(found)) for found in reversed(newest_first(path / "checkpoints"))],
        trace=trace,
        silent_s=silent_s(path),
    )


def read_records(path: Path) -> tuple[dict[str, list[Record]], list[str]]:
    """Records by kind, those of all kinds as `all`, and what is said of lines that were left out.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): this run has not recorded anything.") from error
    *lines, rest = text.split("\n")
    records: dict[str, list[Record]] = {"all": []}
    damaged = []
    for number, line in enumerate(lines, start=1):
        record = _record(line)
        if record is None:
            damaged.append(number)
            continue
        records["all"].append(record)
        records.setdefault(record["kind"], []).append(record)
    said = ["the last line of metrics.jsonl is only half written, and left out"] if rest else []
    if damaged:
        what = f"line {damaged[0]}" if len(damaged) == 1 else f"{len(damaged)} lines, the first one {damaged[0]},"
        said.append(f"metrics.jsonl, {what} is damaged and left out: no record with a kind and a step")
    return records, said


def _read_config(path: Path) -> tuple[str, list[str]]:
    """The text of the configuration, "" where it cannot be read; and what is wrong with it."""
    try:
        text = path.read_text(encoding="utf-8")
        tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        return "", [f"config.toml cannot be read ({error})"]
    return text, []


def _record(line: str) -> Record | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    record = of_known_kinds(found) if isinstance(found, dict) else {}
    return record if isinstance(record.get("kind"), str) and "step" in record else None


def _manifest(folder: Path) -> Manifest | str:
    try:
        return read_manifest(folder)
    except CheckpointError as error:
        return str(error)


_ABSENT = object()


def _look_up(record: Record, key: str) -> object:
    value: Any = record
    for part in key.split("."):
        value = value.get(part, _ABSENT) if isinstance(value, dict) else _ABSENT
    return value


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _flatten(table: Mapping[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{place}{key}.")
        else:
            yield f"{place}{key}", value


@dataclass(frozen=True)
class ReportOptions:
    """Write a page about a run, or about several beside each other: one HTML file that needs nothing else.

    It holds what was run, curves, where the time went, restarts, lost ranks, checkpoints and the configuration.
    """

    runs: Annotated[tuple[Path, ...], Arg("RUN_FOLDER", positional=True)]
    """Folders of runs, such as runs/digits."""
    output: Path | None = None
    """File to write; else report.html in the first run's folder. An older report is overwritten."""


NAME = "report.html"
# The mark of a report lies within so many characters of its beginning.
_HEAD = 500


def report_by(options: ReportOptions) -> str:
    """Write what the command line asks for; as `report`."""
    return report(options.runs, options.output)


def report(paths: Sequence[Path], output: Path | None) -> str:
    """Writes a page about one run, or about several beside each other; returns what was written, in words.

    Args:
        paths: folders of runs, at least one.
        output: the file; None for `report.html` in the first run's folder. An older report is overwritten.

    Raises:
        ConfigError: a folder is no run or has recorded nothing; matplotlib is missing; the file is something else or
            cannot be written.
    """
    runs = [read(path, label) for path, label in zip(paths, labels(list(paths)), strict=True)]
    try:
        from mpidp.tools.report.page import MARK, page
    except ImportError as error:
        raise ConfigError(f"mpidp report draws with a package: pip install matplotlib ({error})") from error
    target = output or paths[0] / NAME
    _check(target, MARK)
    text = page(runs)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.unlink(missing_ok=True)
        with open(partial, "x", encoding="utf-8", errors="backslashreplace") as file:  # through no link of that name
            file.write(text)
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"{target} cannot be written: {error.strerror}. Give another place: --output FILE") from error
    what = ", ".join(f"{run.label} to step {run.last_step:,}" for run in runs)
    return f"{target}: {what}; {size_text(target.stat().st_size)}"


def labels(paths: list[Path]) -> list[str]:
    """Names of runs for legends: of their folders, or the paths where these are the same.

    Raises:
        ConfigError: a run is given twice.
    """
    resolved = [path.resolve() for path in paths]
    for number, path in enumerate(resolved):
        if path in resolved[:number]:
            raise ConfigError(f"{paths[number]} is given twice. Give each run once.")
    names = [path.name for path in resolved]
    chosen = names if len(set(names)) == len(names) else list(map(str, paths))
    # matplotlib passes over what begins with "_"; control characters are not XML.
    return [("./" if name.startswith("_") else "") + _printable(name) for name in chosen]


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


def _check(target: Path, mark: str) -> None:
    """Refuses to overwrite what is not a report."""
    if not target.exists():
        return
    try:
        with open(target, encoding="utf-8", errors="replace") as file:
            is_report = mark in file.read(_HEAD)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}. Give another place: --output FILE") from error
    if not is_report:
        raise ConfigError(f"{target} exists and is no report; it is not overwritten. Give another name: --output FILE")
