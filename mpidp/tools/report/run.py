"""A run folder enters, what it recorded leaves: configuration, starts, metrics, checkpoints. No torch, no MPI."""

import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mpidp.errors import CheckpointError, ConfigError
from mpidp.tools.record_kinds import of_known_kinds
from mpidp.tools.report.trace import Trace, read_trace
from mpidp.tools.run_state import SILENT_S, read_starts, silent_s
from mpidp.train.checkpoints import manifest as manifests
from mpidp.train.checkpoints.checkpoint import newest_first
from mpidp.train.checkpoints.manifest import Manifest

Record = dict[str, Any]


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
        starts: the entries of `env.json`.
        records: of `metrics.jsonl`, in order, by kind; at least one of kind `train`.
        is_cut: whether a half-written last line was left out.
        checkpoints: name, and manifest or what is wrong with it; oldest first.
        trace: what `trace.json` says of the ranks' time; None without one.
        silent_s: seconds since the last sign of life.
    """

    path: Path
    label: str
    config_text: str
    starts: list[dict[str, Any]]
    records: dict[str, list[Record]]
    is_cut: bool
    checkpoints: list[tuple[str, Manifest | str]]
    trace: Trace | None
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
            return "without a word: killed, or aborted"
        return "still running" if self.silent_s < SILENT_S else "silent: it hangs, or died without a word"


def read(path: Path, label: str) -> Run:
    """The run in a folder.

    Raises:
        ConfigError: no run folder, one that cannot be read, or one without a record of training.
    """
    if not path.is_dir():
        raise ConfigError(f"{path}: there is no such folder. Give the folder of a run, for example runs/digits.")
    starts = read_starts(path)
    metrics = path / "metrics.jsonl"
    records, is_cut = read_records(metrics)
    if "train" not in records:
        raise ConfigError(
            f"{metrics} holds no record of training yet; there is nothing to report. One is written every "
            f"log.every_steps steps and at the end of an epoch."
        )
    return Run(
        path=path,
        label=label,
        config_text=(path / "config.toml").read_text(encoding="utf-8"),
        starts=starts,
        records=records,
        is_cut=is_cut,
        checkpoints=[(found.name, _manifest(found)) for found in reversed(newest_first(path / "checkpoints"))],
        trace=read_trace(path / "trace.json"),
        silent_s=silent_s(path),
    )


def read_records(path: Path) -> tuple[dict[str, list[Record]], bool]:
    """Records by kind, those of all kinds as `all`, and whether a half-written last line was left out.

    Raises:
        ConfigError: the file cannot be read, or a whole line is no record.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): this run has not recorded anything.") from error
    *lines, rest = text.split("\n")
    records: dict[str, list[Record]] = {"all": []}
    for number, line in enumerate(lines, start=1):
        record = _record(line)
        if record is None:
            raise ConfigError(f"{path}, line {number} is damaged: no record with a kind and a step: {line[:80]!r}")
        records["all"].append(record)
        records.setdefault(record["kind"], []).append(record)
    return records, bool(rest)


def _record(line: str) -> Record | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    record = of_known_kinds(found) if isinstance(found, dict) else {}
    return record if isinstance(record.get("kind"), str) and "step" in record else None


def _manifest(folder: Path) -> Manifest | str:
    try:
        return manifests.read(folder)
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
