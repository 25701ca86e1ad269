"""`mpidp status`: the progress of runs, from the small files in their folders, and the state of their Slurm jobs.

Needs neither torch nor MPI, and locks nothing. Run folders of others, and damaged ones, are read too: what is not of
the kind that a run records counts as not recorded.
"""

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from mpidp.errors import ConfigError, RecordError
from mpidp.options import Arg
from mpidp.tools.table import table
from mpidp.train.checkpoint.read import newest_first
from mpidp.train.records import starts

_LARGEST = 2**63


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    """Whether arithmetic and axes can take it; null is what a run writes for a number that was not finite."""
    return value is None or (type(value) in (int, float) and -_LARGEST < value < _LARGEST)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_table_of_numbers(value: Any) -> bool:
    return _is_table(value) and all(item is not None and _is_number(item) for item in value.values())


_KINDS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("end", "time"), _is_text),
    **dict.fromkeys(("accuracy", "grad_norm", "loss", "loss_scale", "lost_s", "lr", "samples_per_s"), _is_number),
    **dict.fromkeys(("first_step", "last_step", "nodes", "ranks", "samples", "skipped_steps", "step"), _is_count),
    **dict.fromkeys(("memory_bytes", "seconds"), _is_table_of_numbers),
    "hosts": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "lost": lambda value: isinstance(value, list) and all(map(_is_table, value)),
    "packages": lambda value: _is_table(value) and all(map(_is_text, value.values())),
    "slurm_job_id": lambda value: value is None or _is_text(value),
}


def of_known_kinds(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The entry without values of another kind than its keys have; keys that are not known stay as they are."""
    return {key: value for key, value in entry.items() if key not in _KINDS or _KINDS[key](value)}


# A run that has not written for so long does not count as running, unless Slurm says so.
SILENT_S = 300.0


@dataclass(frozen=True)
class RunState:
    """The progress of a run.

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
        """The state in a word or two."""
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
    """Seconds since the last start or record of the run in a folder."""
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


SLURM_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class StatusOptions:
    """Print how far a run is (step, loss, time left, last checkpoint, restarts) and what Slurm says of its job.

    Without a folder, a line for each run in runs/.
    """

    folder: Annotated[Path | None, Arg("[RUN_FOLDER]", positional=True)] = None
    """Folder of a run, or of runs."""


def status_by(options: StatusOptions) -> str:
    """Print what the command line asks for; as `status`."""
    return status(options.folder)


def status(path: Path | None) -> str:
    """The state of one run in lines, or of all runs in `runs/`, newest first, in a table.

    Raises:
        ConfigError: there is no such run, or no runs.
    """
    if path is not None and is_run(path):
        return _details(read_run(path))
    parent = Path("runs") if path is None else path
    folders = [found for found in parent.glob("*") if is_run(found)]
    if not folders:
        raise ConfigError(f"{parent} holds no runs. Give a run's folder: mpidp status runs/NAME")
    runs = sorted(map(read_run, folders), key=lambda run: run.silent_s)
    rows = [[run.path.name, _state(run), _steps(run), _loss(run), _left(run), run.checkpoint or "-"] for run in runs]
    lines = [table(("run", "state", "step", "loss", "left", "last checkpoint"), rows, indent="")]
    return "\n".join([*lines, *(text for run in runs for text in run.damaged)])


def _details(run: RunState) -> str:
    saved = f"{run.checkpoint}, {duration(run.checkpoint_age_s)} old" if run.checkpoint else "none yet"
    job = f"Slurm job {run.job}: {slurm_state(run.job)}" if run.job else "not started by Slurm"
    return "\n".join(
        [
            f"run:        {run.path}",
            f"state:      {_state(run)}; last sign of life {duration(run.silent_s)} ago",
            f"job:        {job}",
            f"size:       {run.ranks or '?'} ranks on {run.nodes or '?'} nodes",
            f"step:       {_steps(run)}, loss {_loss(run)}, left {_left(run)}",
            f"checkpoint: {saved}",
            f"restarts:   {run.starts - 1 if run.starts else '?'}",
            *(f"damaged:    {text}" for text in run.damaged),
        ]
    )


def _state(run: RunState) -> str:
    if run.end or run.state == "running":
        return run.state
    return "silent: it hangs, or died without a record of its end"


def _steps(run: RunState) -> str:
    return "-" if run.step is None else f"{run.step:,}" + (f" of {run.last_step:,}" if run.last_step else "")


def _loss(run: RunState) -> str:
    return "-" if run.loss is None else f"{run.loss:.4f}"


def _left(run: RunState) -> str:
    return duration(run.left_s) if run.left_s is not None and not run.end else "-"


def duration(seconds: float) -> str:
    """A span of time in its two largest units: "2 h 5 min"."""
    whole = max(0, round(seconds))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"


def slurm_state(job: str) -> str:
    """What squeue, or sacct for a job that has left the queue, says; or why nothing is known."""
    queued = _ask(["squeue", "--noheader", f"--jobs={job}", "--format=%T, %M of %l, %R"])
    if queued:
        return queued
    words = ["sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={job}", "--format=State,Elapsed,ExitCode"]
    ended = _ask(words)
    if ended:
        return ended.splitlines()[-1].replace("|", ", ")
    return "not in the queue" if shutil.which("squeue") else "there is no squeue here"


def _ask(words: list[str]) -> str:
    """The output of a command of Slurm; "" if there is no such command, it fails, or prints nothing."""
    if shutil.which(words[0]) is None:
        return ""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SLURM_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
