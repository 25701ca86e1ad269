"""A run's name, what was asked and Slurm's variables in; the run folder to continue out, if there is one.

A job that Slurm starts again (preempted, a node lost, `scontrol requeue`) has the same job number and runs the same
script. It goes on with the run that it began.
"""

import dataclasses
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from mpidp.config import RunConfig
from mpidp.errors import RecordError
from mpidp.printable import listed
from mpidp.train.checkpoints.checkpoint import newest_first
from mpidp.train.records import starts

log = logging.getLogger("mpidp")
AUTO = Path("auto")


def for_array_task(config: RunConfig, environment: Mapping[str, str]) -> RunConfig:
    """The run as this task of a Slurm array has it: the task's number behind the name, so that no two share a name."""
    task = environment.get("SLURM_ARRAY_TASK_ID", "")
    if not task.isdecimal():
        return config
    return dataclasses.replace(config, run=dataclasses.replace(config.run, name=f"{config.run.name}_{task}"))


def choose_resume(config: RunConfig, asked: Path | None, environment: Mapping[str, str]) -> tuple[Path | None, str]:
    """The run folder to continue, or None for a new run; and a line that says why, or "". Reads the file system.

    Args:
        config: the run, with its final name.
        asked: `--resume`: a folder, `auto` for this run's newest folder with a checkpoint if there is one, or None.
        environment: SLURM_RESTART_COUNT above 0 and no `asked` mean: the folder that this job began.
    """
    restarts = environment.get("SLURM_RESTART_COUNT", "")
    if asked == AUTO:
        job, why = None, "--resume=auto"
    elif asked is None and restarts.isdecimal() and int(restarts):
        job, why = environment.get("SLURM_JOB_ID", ""), f"Slurm started job {environment.get('SLURM_JOB_ID')} again"
    else:
        return asked, ""
    folders = list(run_folders(config.run.parent, config.run.name))
    if job is not None:
        # One whose record is lost may be this job's: without another, to begin anew would be worse.
        begun = {path: _is_of(path, job) for path in folders}
        folders = [path for path in folders if begun[path]] or [path for path in folders if begun[path] is None]
    for path in folders:
        if newest_first(path / "checkpoints"):
            return path, f"{why}: continuing {path}"
    found = f"no checkpoint in {listed(folders)}" if folders else "no run folder of it"
    return None, f"{why}: {found}; starting from the beginning"


def run_folders(parent: Path, name: str) -> Iterator[Path]:
    """The folders `parent/name`, `parent/name-2` and so on that exist, newest first."""
    pattern = re.compile(re.escape(name) + r"(?:-([0-9]+))?")
    matches = [(pattern.fullmatch(path.name), path) for path in parent.glob("*") if path.is_dir()]
    numbered = [(int(match[1] or 1), path) for match, path in matches if match]
    yield from (path for _, path in sorted(numbered, reverse=True))


def _is_of(folder: Path, job: str) -> bool | None:
    """Whether a run folder was begun or continued by this Slurm job; None where its record is lost."""
    try:
        return any(start.get("slurm_job_id") == job for start in starts.read(folder))
    except (OSError, RecordError) as error:
        log.warning("which jobs trained in %s is not known: %s", folder, error)
        return None
