"""Run programs as MPI jobs on the hosts that hosts.sh makes; needs root.

The launcher is the one beside this Python: MPICH's (Hydra) or Open MPI's (PRRTE). Both decide which ranks share a node
by the host that they started them on.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
HOSTS_SCRIPT = FOLDER / "hosts.sh"
HOST_SHELL = FOLDER / "host_shell"
HYDRA = Path(sys.executable).parent / "mpiexec.hydra"
PRRTE = Path(sys.executable).parent / "prterun"
BRIDGE = "mpidp-br0"
HOST_PREFIX = "mpidp-h"
MAX_HOSTS = 4
RATE = "1gbit"
LAYOUTS = ((1, 1, 1, 1), (2, 2, 2, 2), (3, 1))  # ranks on each host
JOB_TIMEOUT_S = 120.0  # most of a short job is eight ranks that import torch on two cores
# Across hosts UCX may use TCP only. Inside a host MPICH does not ask UCX: it has shared memory of its own.
WITH_HYDRA = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}
WITH_PRRTE = {
    "PRTE_MCA_plm_ssh_agent": str(HOST_SHELL),
    "PRTE_MCA_prte_if_include": "10.78.0.0/24",  # the hosts' and the bridge's, as hosts.sh has it
    "PRTE_MCA_prte_tmpdir_base": "/dev/shm",  # each host's own; in /tmp daemons with the same number would meet
    "OMPI_MCA_btl_tcp_if_include": "eth0",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
ENVIRONMENT = {"OMP_NUM_THREADS": "1"} | (WITH_HYDRA if HYDRA.exists() else WITH_PRRTE)


class JobFailedError(AssertionError):
    """A job on the hosts that ended with an exit code other than 0 or not in time; the text holds its output."""


def missing() -> str:
    """What this machine lacks for the hosts, or nothing."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    lacking = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if lacking:
        return f"needs {', '.join(lacking)} (on Debian: apt-get install iproute2 util-linux)"
    if not HYDRA.exists() and not PRRTE.exists():
        return f"needs MPICH's or Open MPI's launcher, {HYDRA} or {PRRTE}"
    return ""


def hosts_up(hosts: int = MAX_HOSTS, rate: str = RATE) -> None:
    """Bring up the hosts, in place of those that are there.

    Raises:
        RuntimeError: it did not work, for example because the kernel lacks something; none is left then.
    """
    _hosts_script("up", str(hosts), rate)


def hosts_down() -> None:
    """Remove the hosts with everything that runs on them."""
    _hosts_script("down")


def mpiexec(ranks_per_host: Sequence[int]) -> list[str]:
    """The words that start processes on the hosts: `(3, 1)` is three on the first and one on the second."""
    places = ",".join(f"{HOST_PREFIX}{number}:{count}" for number, count in enumerate(ranks_per_host, start=1))
    if HYDRA.exists():
        launcher = ["-launcher", "rsh", "-launcher-exec", str(HOST_SHELL)]
        return [str(HYDRA), "-iface", BRIDGE, *launcher, "-hosts", places]
    # A host lives as long as the command that host_shell was given, so daemons stay attached to it. All hosts have the
    # same cores, to which nobody must be bound.
    attached = ["--leave-session-attached", "--bind-to", "none"]
    return [str(PRRTE.with_name("mpiexec")), *attached, "--host", places]


def run_on_hosts(
    arguments: Sequence[str | Path | int],
    hosts: int = MAX_HOSTS,
    ranks_per_host: int | Sequence[int] = 1,
    timeout_s: float = JOB_TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a command, for example `[sys.executable, "program.py"]`, as an MPI job on the first hosts.

    Let only rank 0 print: Hydra mixes the lines of several ranks.

    Args:
        arguments: the command and its arguments.
        hosts: how many hosts; not used when `ranks_per_host` lists them.
        ranks_per_host: ranks on every host, or on each: `(3, 1)` is three on the first and one on the second.
        timeout_s: seconds after which everything on the hosts is killed.
        environment: variables on top of this process's own and of `ENVIRONMENT`.
        check: whether an exit code other than 0 is an error.

    Raises:
        JobFailedError: the exit code was not 0 (with `check`), or the job did not end in time.
    """
    counts = [ranks_per_host] * hosts if isinstance(ranks_per_host, int) else list(ranks_per_host)
    command = [*mpiexec(counts), "-n", str(sum(counts)), *map(str, arguments)]
    variables = os.environ | ENVIRONMENT | dict(environment or {})
    # Files, not pipes: a pipe ends only with the last process that holds it, which may be one that hangs.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, env=variables, stdout=output, stderr=errors, start_new_session=True)
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill(process, len(counts))
        output.seek(0)
        errors.seek(0)
        texts = output.read(), errors.read()
    if code is None or (check and code != 0):
        what = f"did not end within {timeout_s:g} s" if code is None else f"ended with exit code {code}"
        raise JobFailedError(f"{' '.join(command)}\n{what}\n-- stdout\n{texts[0]}\n-- stderr\n{texts[1]}")
    return subprocess.CompletedProcess(command, code, *texts)


def _kill(process: subprocess.Popen[bytes], hosts: int) -> None:
    """Kill mpiexec if it still runs, and then what it left on the hosts."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for number in range(1, hosts + 1):
        listing = subprocess.run(["ip", "netns", "pids", f"{HOST_PREFIX}{number}"], stdout=subprocess.PIPE, text=True)
        for pid in listing.stdout.split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue  # it ended meanwhile, or with its host's first process


def _hosts_script(*words: str) -> None:
    done = subprocess.run([HOSTS_SCRIPT, *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{HOSTS_SCRIPT.name} {' '.join(words)} failed: {done.stderr.strip()}")
