"""Trainings on several hosts of which one rank fails, stops or never comes: who, on which host, and the job's end."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from cluster import HYDRA, JOB_TIMEOUT_S
from page_cases import program

from jobs import Result, run_job

pytestmark = pytest.mark.timeout(JOB_TIMEOUT_S + 30)
FOUR, TWO = (1, 1, 1, 1), (1, 2)  # ranks on each host
LIMITS = {"warning": "2.0", "abort": "8.0"}  # seconds; a rank counts as silent after 15/8 of the first
ENDS = "The job ends (stall_abort_s = 8)."
# The launcher's process on that host, too: all that runs there but for the shell that waits for it.
STOP_HOST = "os.kill(os.getppid(), signal.SIGSTOP); os.kill(os.getpid(), signal.SIGSTOP)"
UNPLUG = "os.system('ip link set eth0 down')"
Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, use_hosts: Callable[[Sequence[int]], None]) -> Run:
    """Run a case of docs/reference/failures.md on hosts; the last rank, or `rank`, is the one that fails."""

    def call(case: str, layout: Sequence[int], rank: int | None = None, **changes: str) -> Result:
        use_hosts(layout)
        (tmp_path / "train.py").write_text(program(case, sum(layout) - 1 if rank is None else rank, **changes))
        return run_job(["train.py"], sum(layout), JOB_TIMEOUT_S, cwd=tmp_path)

    return call


@pytest.mark.parametrize("layout", [FOUR, TWO], ids=str)
def test_an_exception_on_another_host(run: Run, layout: Sequence[int]) -> None:
    """Behaviour 30: the traceback says whose it is, and where that rank ran."""
    result = run("exception", layout)
    last = sum(layout) - 1
    assert result.code == 1, result.output
    assert f"[rank {last} of {last + 1} on mpidp-h{len(layout)}] at step 5" in result.output
    assert result.output.count("ZeroDivisionError: division by zero") == 1


def test_a_rank_of_another_host_is_killed(run: Run) -> None:
    """Behaviour 31, without fault tolerance."""
    result = run("sigkill", FOUR)
    assert result.code != 0
    if HYDRA.exists():  # with Open MPI a rank that misses the dead one may end the job first, and be named for it
        assert "RUNNING AT mpidp-h4" in result.output
    assert "stalled" not in result.output


def test_a_rank_that_is_stopped(run: Run) -> None:
    """Behaviour 32: a neighbour on its host, which is not the watching one's, asks the kernel."""
    result = run("stopped", TWO, **LIMITS)
    assert result.code == 1, result.output
    assert "rank 2 (mpidp-h2) does not arrive" in result.output
    assert "ranks 0-1 wait in" in result.output and "train.py:" in result.output
    assert "rank 2 on mpidp-h2 does not answer: heard of" in result.output
    assert "its process is stopped (SIGSTOP" in result.output
    assert ENDS in result.output


@pytest.fixture
def plug_in() -> Iterator[None]:
    """Connects the fourth host again after the test."""
    yield
    subprocess.run(["ip", "-n", "mpidp-h4", "link", "set", "eth0", "up"], check=True)


@pytest.mark.skipif(not HYDRA.exists(), reason="Open MPI's launcher does not end without its daemon on that host")
@pytest.mark.usefixtures("plug_in")
@pytest.mark.parametrize(("rank", "step"), [(0, STOP_HOST), (3, UNPLUG)], ids=["stopped", "unplugged"])
def test_a_host_that_is_gone(run: Run, rank: int, step: str) -> None:
    """Behaviour 32: nobody there can be asked; rank 0's place is taken by the last rank, on another host."""
    result = run("stopped", FOUR, rank, step=step, **LIMITS)
    assert result.code == 1, result.output
    assert f"rank {rank} (mpidp-h{rank + 1}) does not arrive" in result.output
    assert f"ranks {'1-3' if rank == 0 else '0-2'} wait in" in result.output
    assert f"rank {rank} on mpidp-h{rank + 1} does not answer: heard of" in result.output
    assert "and no rank of its node does" in result.output
    assert ENDS in result.output


def test_a_rank_that_computes_for_ever(run: Run) -> None:
    """Behaviour 32: the line of the user's program it is in, told from host to host."""
    result = run("hangs", FOUR, data="spin()", **LIMITS)
    assert result.code == 1, result.output
    assert "rank 3 (mpidp-h4) does not arrive" in result.output
    _, found, rest = result.output.partition("rank 3 on mpidp-h4: step 3, phase data for")
    assert found, result.output
    assert "its main thread:" in rest and ", in spin" in rest and "while True:" in rest
    assert ENDS in result.output
