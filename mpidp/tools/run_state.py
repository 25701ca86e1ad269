"""A run folder in, how far the run is out. Reads only small files; needs neither torch nor MPI, and locks nothing."""

import json
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from mpidp.errors import ConfigError, RecordError
from mpidp.tools.record_kinds import of_known_kinds
from mpidp.train.checkpoints.checkpoint import newest_first
from mpidp.train.records import starts

# A run that has not written for so long is no longer taken for running, unless Slurm says so.
SILENT_S = 300.0


@dataclass(frozen=True)
class RunState:
    """How far a run is.

    Attributes:
        path: its folder.
        starts: how often it was started, the first time included.
        job: Slurm's number of the last start's job, or "".
        ranks, nodes: of the last start.
        step, last_step: optimizer steps done, and of the whole run; None where it has not said.
        loss: of the last recorded steps.
        left_s: seconds to the end at the pace of this start, or None.
        checkpoint: name of the newest complete checkpoint, or "".
        checkpoint_age_s, silent_s: seconds since it was written, and since the last record.
        end: how the last start ended ("done", "stopped by SIGTERM"), or "" if it runs or died.
        damaged: what is wrong with each record that cannot be read; what it would have told is missing above.
    """

    path: Path
    starts: int
    job: str
    ranks: int | None
    nodes: int | None
    step: int | None
    last_step: int | None
    loss: float | None
    left_s: float | None
    checkpoint: str
    checkpoint_age_s: float
    silent_s: float
    end: str
    damaged: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """In a word or two."""
        return self.end or ("running" if self.silent_s < SILENT_S else "silent")


def read_run(path: Path) -> RunState:
    """The state of the run in a folder.

    Raises:
        ConfigError: no run folder, or one that cannot be read.
    """
    entries, damaged = read_starts(path)
    last = entries[-1] if entries else {}
    now = time.time()
    trained = _last_record(path / "metrics.jsonl", "train")
    step = trained["step"] if trained else last.get("first_step")
    total = last.get("last_step")
    checkpoint = next(iter(newest_first(path / "checkpoints")), None)
    return RunState(
        path=path,
        starts=len(entries),
        job=last.get("slurm_job_id") or "",
        ranks=last.get("ranks"),
        nodes=last.get("nodes"),
        step=step,
        last_step=total,
        loss=trained.get("loss") if trained else None,
        left_s=_left_s(path, last, step, total),
        checkpoint=checkpoint.name if checkpoint else "",
        checkpoint_age_s=now - checkpoint.stat().st_mtime if checkpoint else 0.0,
        silent_s=silent_s(path),
        end=last.get("end", ""),
        damaged=tuple(damaged),
    )


def is_run(path: Path) -> bool:
    """Whether a folder is that of a run."""
    return (path / starts.FILE).exists() or (path / "checkpoints").is_dir()


def silent_s(path: Path) -> float:
    """Seconds since the last sign of life of the run in a folder: its start, or a record."""
    files = (path / "metrics.jsonl", path / starts.FILE)
    return time.time() - max((file.stat().st_mtime for file in files if file.exists()), default=path.stat().st_mtime)


def read_starts(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """What `env.json` says of each start of a run, the first one first; and what is wrong with it, if it is damaged.

    Raises:
        ConfigError: no run folder.
    """
    if not is_run(path):
        raise ConfigError(f"{path} is not the folder of a run, or is just being made: it has no {starts.FILE}")
    try:
        return [of_known_kinds(start) for start in starts.read(path)], []
    except FileNotFoundError:
        return [], [f"{path / starts.FILE} is missing"]
    except RecordError as error:
        return [], [str(error)]


def _last_record(path: Path, kind: str) -> dict[str, Any] | None:
    """The last whole record of a kind; a long file is read from its end."""
    if not path.exists():
        return None
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 2**16))
        lines = file.read().decode(errors="replace").splitlines()
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue  # the first line may be cut, and the last one half written
        if isinstance(record, dict) and record.get("kind") == kind and "step" in of_known_kinds(record):
            return of_known_kinds(record)
    return None


def _left_s(path: Path, start: dict[str, Any], step: int | None, total: int | None) -> float | None:
    """Seconds to the last step at the mean pace since this start, evaluations and checkpoints included."""
    if step is None or total is None or "first_step" not in start or step <= start["first_step"]:
        return None
    try:
        begun = datetime.strptime(start.get("time", ""), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return None
    passed_s = (path / "metrics.jsonl").stat().st_mtime - begun
    return passed_s / (step - int(start["first_step"])) * (total - step)
