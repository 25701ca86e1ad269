"""Jobs under mpiexec, run to their end: exit code and output.

`MPIEXEC` in the environment replaces the launcher beside this Python, flags included.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Result:
    """How a job ended: its exit code (negative: the signal that ended it), and what all its ranks printed."""

    code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        """Everything printed, both streams."""
        return self.stdout + self.stderr


def launch(
    arguments: Sequence[str | Path],
    ranks: int,
    *,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Start `python ARGUMENTS` on so many ranks, in a process group of its own; 0 ranks: without a launcher.

    The current folder is the project's unless `cwd` says otherwise; `environment` is laid over this process's.
    """
    words = [str(word) for word in (*(mpiexec(ranks) if ranks else ()), sys.executable, *arguments)]
    return subprocess.Popen(
        words,
        cwd=cwd or ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        stdin=subprocess.DEVNULL,  # the launcher would read the terminal's
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run_job(
    arguments: Sequence[str | Path],
    ranks: int,
    timeout_s: float = 45.0,
    *,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Result:
    """Run `python ARGUMENTS` on so many ranks to its end.

    Raises `AssertionError`, with the output so far, when it does not end within `timeout_s`: a hang is a failure.
    """
    return finish(launch(arguments, ranks, cwd=cwd, environment=environment), timeout_s)


def finish(job: subprocess.Popen[str], timeout_s: float = 45.0) -> Result:
    """Wait for a launched job and return how it ended; nothing of it is left running."""
    try:
        stdout, stderr = job.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        kill(job)
        stdout, stderr = job.communicate()
        raise AssertionError(f"no end within {timeout_s} s; killed\n{stdout}{stderr}") from None
    except BaseException:
        kill(job)
        raise
    return Result(job.returncode, stdout, stderr)


def kill(job: subprocess.Popen[str]) -> None:
    """End the launcher and all ranks at once with SIGKILL, as a node that loses power would."""
    for group in _groups(job.pid):
        os.killpg(group, signal.SIGKILL)


def mpiexec(ranks: int) -> list[str]:
    """Return the words that start so many ranks."""
    beside = Path(sys.executable).parent / "mpiexec"
    return [*shlex.split(os.environ.get("MPIEXEC", str(beside))), "-n", str(ranks)]


def _groups(root: int) -> set[int]:
    """Return the process groups of a process and all its descendants; launchers give ranks groups of their own."""
    parents: dict[int, tuple[int, int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended meanwhile
            parents[int(folder.name)] = int(fields[1]), int(fields[2])
    family = {root}
    while more := {process for process, (parent, _) in parents.items() if parent in family} - family:
        family |= more
    return {parents[process][1] for process in family if process in parents}
