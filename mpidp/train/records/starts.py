"""The starts of a run: the entries of `env.json`, and which run a start continues. No MPI, no torch.

`env.json` is a list with an entry a start. A job that Slurm starts again (preempted, a node lost, `scontrol requeue`)
has the same job number and runs the same script. It goes on with the run that it began.
"""

import dataclasses
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpidp.errors import RecordError
from mpidp.printable import listed
from mpidp.train.checkpoint.read import newest_first
from mpidp.world.record_file import read_json, write_json

if TYPE_CHECKING:
    from mpidp.config import RunConfig

FILE = "env.json"
log = logging.getLogger("mpidp")


def read(folder: Path) -> list[dict[str, Any]]:
    """The entries of a run folder, the first start first; at least one.

    Raises:
        FileNotFoundError: there is no such file.
        RecordError: it is damaged.
    """
    starts = read_json(folder / FILE, list)
    if not starts or not all(isinstance(start, dict) for start in starts):
        raise RecordError(f"{folder / FILE} is damaged (it is no list of starts)")
    return starts


def add(folder: Path, start: dict[str, Any]) -> None:
    """Adds an entry. A damaged file is kept beside the new one, and does not prevent a start.

    Raises:
        OSError: the file cannot be written.
    """
    path = folder / FILE
    try:
        starts = read(folder)
    except FileNotFoundError:
        starts = []
    except RecordError as error:
        damaged = path.replace(path.with_name(f"{FILE}.damaged"))
        log.warning("%s; it is kept as %s, and starts before this one are not known", error, damaged.name)
        starts = []
    write_json(path, [*starts, start])


def note(folder: Path, **facts: Any) -> None:
    """Adds facts to the last entry; a failure is only logged."""
    try:
        starts = read(folder)
        starts[-1].update(facts)
        write_json(folder / FILE, starts)
    except (OSError, RecordError) as error:
        log.warning("cannot note %s: %s", facts, error)


HIDDEN = "***"

_NAME = re.compile(
    r"pass(word|wd|phrase|code)|secret|credential|authori[sz]ation|(^|[^a-z])(auth|bearer)([^a-z]|$)|(token|key)$",
    re.IGNORECASE,
)
_USER_OF_URL = re.compile(r"(?<=://)[^/\s]+(?=@)")  # user:password, or a token alone
_QUERY = re.compile(r"([?&;]([^=&;\s]+)=)[^&;\s#]+")


def without_secrets(words: Sequence[str]) -> list[str]:
    """Replace values of options and variables that are named like secrets, and user names and passwords in URLs.

    Args:
        words: as in `sys.argv`: `--name=VALUE`, `--name VALUE`, `NAME=VALUE`, or anything else.
    """
    hidden: list[str] = []
    is_value_of_secret = False
    for word in words:
        name, equals, _ = word.partition("=")
        is_option = word.startswith("--")
        if is_value_of_secret and not is_option:
            hidden.append(HIDDEN)
        elif equals and re.fullmatch(r"[\w.-]+", name) and _NAME.search(name):
            hidden.append(f"{name}={HIDDEN}")
        else:
            hidden.append(_QUERY.sub(_hide_query, _USER_OF_URL.sub(HIDDEN, word)))
        is_value_of_secret = word.startswith("-") and not equals and _NAME.search(word) is not None
    return hidden


def _hide_query(found: re.Match[str]) -> str:
    return f"{found[1]}{HIDDEN}" if _NAME.search(found[2]) else found[0]


AUTO = Path("auto")


def for_array_task(config: "RunConfig", environment: Mapping[str, str]) -> "RunConfig":
    """The run of this task of a Slurm array: the task's number is appended to the name, so that names differ."""
    task = environment.get("SLURM_ARRAY_TASK_ID", "")
    if not task.isdecimal():
        return config
    return dataclasses.replace(config, run=dataclasses.replace(config.run, name=f"{config.run.name}_{task}"))


def choose_resume(config: "RunConfig", asked: Path | None, environment: Mapping[str, str]) -> tuple[Path | None, str]:
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
        # One whose record is lost may be this job's: if there is no other, beginning anew would be worse.
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
    """Whether a run folder was begun or continued by this Slurm job; None if its record is lost."""
    try:
        return any(start.get("slurm_job_id") == job for start in read(folder))
    except (OSError, RecordError) as error:
        log.warning("which jobs trained in %s is not known: %s", folder, error)
        return None
