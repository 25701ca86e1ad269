"""A run folder, or the folder of all runs, in; how far they are, and what Slurm says of their jobs, out."""

import shutil
import subprocess
from pathlib import Path

from mpidp.errors import ConfigError
from mpidp.tools.run_state import RunState, is_run, read_run
from mpidp.tools.table import table

SLURM_TIMEOUT_S = 20.0


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
    return "silent: it hangs, or died without a word"


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
    """The answer of a command of Slurm; "" where it is missing, refuses or knows nothing."""
    if shutil.which(words[0]) is None:
        return ""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SLURM_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
