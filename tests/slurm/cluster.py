"""Submit job scripts to the Slurm of slurm.sh, and follow their states, exit codes and logs; needs root."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
SCRIPT = FOLDER / "slurm.sh"
POLL_S = 0.2
JOB_TIMEOUT_S = 100.0
ENDS = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"}


@dataclass(frozen=True)
class Job:
    """What Slurm says of a job, and what it has written so far."""

    number: str
    state: str
    code: int
    restarts: int
    log: str


def missing() -> str:
    """What this machine lacks for a Slurm of its own, or nothing."""
    if os.geteuid() != 0:
        return "needs root, for the daemons"
    lacking = [tool for tool in ("slurmctld", "slurmd", "sbatch", "munged", "unshare") if shutil.which(tool) is None]
    return (
        f"needs {', '.join(lacking)} (Debian: apt-get install slurmctld slurmd slurm-client munge)" if lacking else ""
    )


def network() -> dict[str, str]:
    """Settings of MPICH's network layer: both nodes are this machine, and reach each other by TCP on one interface.

    With its other layer, UCX, the wheel's MPICH 5.0 sends 4 KiB from where its address lies, whatever its length, in
    hex with runs of zeros shortened. Where few zeros lie behind it a line has 1,075 characters. Slurm 22.05 reads 1,024
    of them, says "mpi/pmi2: value not properly terminated in client request", and no job starts. No variable decides
    that, but what the memory holds: with lines of 979 in a plain program all starts went well, and with blocks of
    letters between those that UCX takes none did.
    """
    settings = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
    lines = Path("/proc/net/route").read_text().splitlines()[1:]
    return settings | ({"FI_TCP_IFACE": lines[0].split()[0]} if lines else {})


class Cluster:
    """A Slurm of two nodes, n1 and n2, of 4 CPUs and 2 fake GPUs each; partition `urgent` preempts `main`."""

    def __init__(self, folder: Path):
        self.folder = folder

    def up(self) -> None:
        """Start the daemons; raises RuntimeError when they do not come up."""
        self._slurm("up")

    def down(self) -> None:
        """End the daemons with everything that runs on them."""
        self._slurm("down")

    def kill_node(self, node: str) -> None:
        """Kill the daemon of a node and all its jobs' processes, as if its power went."""
        self._slurm("kill", node)

    def start_node(self, node: str) -> None:
        """Bring a killed node back."""
        self._slurm("start", node)

    def run(self, *words: str | Path, cwd: Path, check: bool = True, **environment: str) -> str:
        """Run a client command of Slurm, or any other, as a user of this cluster; its output, both streams."""
        done = subprocess.run(
            [str(word) for word in words],
            cwd=cwd,
            env=self.environment(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=JOB_TIMEOUT_S,
        )
        assert not check or done.returncode == 0, f"{words} ended with {done.returncode}: {done.stdout}"
        return done.stdout

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Variables of a user of this cluster, who has this Python first in the path."""
        mine = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_", "PYTEST_"))
        }
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return mine | network() | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path} | dict(more or {})

    def submit(self, *words: str | Path, cwd: Path, **environment: str) -> str:
        """`sbatch WORDS`; the job's number."""
        output = self.run("sbatch", "--parsable", *words, cwd=cwd, **environment)
        return output.split(";")[0].strip()

    def job(self, number: str) -> Job:
        """How a job is now. Numbers of array tasks are written 12_3."""
        text = self.run("scontrol", "--oneliner", "show", "job", number, cwd=self.folder)
        facts = dict(re.findall(r"(\w+)=(\S*)", text))
        log = Path(facts.get("StdOut", "/dev/null"))
        code = int(facts["ExitCode"].split(":")[0])
        written = log.read_text(errors="replace") if log.is_file() else ""
        return Job(facts["JobId"], facts["JobState"], code, int(facts["Restarts"]), written)

    def wait(self, number: str, wanted: Callable[[Job], bool] | None = None, timeout_s: float = JOB_TIMEOUT_S) -> Job:
        """Wait for the end of a job, or for something else about it; a job that ends otherwise is a failure."""
        deadline = time.monotonic() + timeout_s
        while True:
            job = self.job(number)
            if job.state in ENDS if wanted is None else wanted(job):
                return job
            over = wanted is not None and job.state in ENDS
            assert not over and time.monotonic() < deadline, (
                f"job {job.number} is {job.state}, code {job.code}\n{job.log}"
            )
            time.sleep(POLL_S)

    def cancel_all(self) -> None:
        """End whatever is queued or runs."""
        self.run("scancel", "--user=root", cwd=self.folder)
        while self.run("squeue", "--noheader", cwd=self.folder).strip():
            time.sleep(POLL_S)

    def _slurm(self, *words: str) -> None:
        done = subprocess.run([SCRIPT, *words, self.folder], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{SCRIPT.name} {' '.join(words)} failed: {done.stdout}{done.stderr}")
