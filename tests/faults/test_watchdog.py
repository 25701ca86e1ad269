"""Ranks that stop taking part, in real jobs: who, where, and what the others wait in is said; then the job ends."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from jobs import Result, run_job

HOST = socket.gethostname()
START = """
import os, signal, sys, time
import mpidp

def load():
    time.sleep(600)

world = mpidp.init(stall_warning_s={warning}, stall_abort_s={abort})
world.sum([1.0])
"""
STOP = "if world.rank == {rank}: os.kill(os.getpid(), signal.SIGSTOP)"
# MPI takes the attributes of COMM_SELF apart, the last one first, before its ranks wait for each other in its end.
STOP_AT_END = """
import os, signal
from mpidp.world.mpi import MPI

MPI.Init_thread(MPI.THREAD_MULTIPLE)
if MPI.COMM_WORLD.rank == {rank}:
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=lambda *_: os.kill(os.getpid(), signal.SIGSTOP)), 1)
"""
MEET = "\nworld.any(True)\nprint('end of rank', world.rank, flush=True)\n"


def run(
    folder: Path,
    code: str,
    ranks: int = 3,
    *,
    warning: float = 1.0,
    abort: float = 4.0,
    before: str = "",
    after: str = "",
) -> Result:
    path = folder / "script.py"
    path.write_text(before + START.format(warning=warning, abort=abort) + code + MEET + after)
    return run_job([path], ranks, timeout_s=60)


@pytest.mark.library
def test_the_first_rank_sleeps(tmp_path: Path) -> None:
    """Behaviour 32: its stack is shown, and what the others wait in; after stall_abort_s the job ends.

    docs/reference/failures.md has another rank that does.
    """
    result = run(tmp_path, "if world.rank == 0: load()")
    assert result.code == 1
    first, last = result.output.split("(stall_abort_s).", 1)
    for text in (first, last):
        assert f"rank 0 ({HOST}) does not arrive" in text
        assert " wait in Allreduce, at mpidp/world/world.py" in text and "script.py:" in text
        assert "its main thread:" in text and "time.sleep(600)" in text and "in load" in text
    assert "The job ends (stall_abort_s = 4)." in last
    assert "end of rank" not in result.output


@pytest.mark.library
@pytest.mark.short
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_is_stopped(tmp_path: Path, rank: int) -> None:
    """Behaviour 32: it cannot answer, so its neighbour asks the kernel; rank 0's place is taken by the last rank."""
    result = run(tmp_path, STOP.format(rank=rank), abort=8.0)
    assert result.code == 1
    assert f"rank {rank} ({HOST}) does not arrive" in result.output
    assert f"rank {rank} on {HOST} does not answer: heard of" in result.output
    assert "its process is stopped (SIGSTOP" in result.output
    assert "The job ends (stall_abort_s = 8)." in result.output


@pytest.mark.library
def test_two_ranks_of_which_one_is_stopped(tmp_path: Path) -> None:
    """Behaviour 32."""
    result = run(tmp_path, STOP.format(rank=0), 2, abort=8.0)
    assert result.code == 1
    assert f"rank 0 on {HOST} does not answer" in result.output


@pytest.mark.library
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_when_the_work_is_done(tmp_path: Path, rank: int) -> None:
    """Behaviour 32: the others have left, and wait for nothing but its leaving."""
    result = run(tmp_path, "", after=STOP.format(rank=rank))
    assert result.code == 1
    assert result.stdout.count("end of rank") == 3
    assert "wait in the job's end, at mpidp/world/exit.py" in result.output
    assert f"rank {rank} on {HOST} does not answer: heard of" in result.output
    assert "its process is stopped (SIGSTOP" in result.output
    assert "The job ends (stall_abort_s = 4)." in result.output


@pytest.mark.library
@pytest.mark.parametrize("moment", ["work", "end"])
def test_both_ranks_that_watch_are_stopped(tmp_path: Path, moment: str) -> None:
    """Behaviour 32: the others notice that nobody answers them."""
    stop = "if world.rank != 1: os.kill(os.getpid(), signal.SIGSTOP)"
    result = run(tmp_path, stop, abort=2.0) if moment == "work" else run(tmp_path, "", abort=2.0, after=stop)
    assert result.code == 1
    assert f"[rank 1 of 3 on {HOST}] step 0, phase start: waits for other ranks since" in result.output
    assert "The job ends (stall_abort_s = 2)." in result.output


@pytest.mark.library
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_is_stopped_in_the_end_of_mpi(tmp_path: Path, rank: int) -> None:
    """Behaviour 32: there the watchdogs are gone and Python's lock is held; each rank says where it waits, and ends."""
    result = run(tmp_path, "", before=STOP_AT_END.format(rank=rank))
    assert result.code != 0
    assert result.stdout.count("end of rank") == 3
    assert "Timeout (0:00:0" in result.output and " in _finalize\n" in result.output


def test_a_rank_may_work_alone_when_the_others_have_left(tmp_path: Path) -> None:
    """Behaviour 32: as rank 0 does that writes what all have found; nobody needs it for anything else."""
    result = run(tmp_path, "", abort=2.0, after="if world.rank == 0: time.sleep(8)")
    assert result.code == 0, result.output
    assert "does not arrive" not in result.output


@pytest.mark.library
def test_leaving_needs_no_stderr_and_no_small_limit(tmp_path: Path) -> None:
    """Behaviour 30: a program that sent its errors to a file and closed that one has done nothing wrong."""
    result = run(tmp_path, "", abort=1e10, after="sys.stderr.close()")
    assert result.code == 0, result.output


@pytest.mark.library
def test_a_program_may_end_mpi_itself(tmp_path: Path) -> None:
    result = run(tmp_path, "", after="from mpi4py import MPI\nMPI.Finalize()\nprint('over', world.rank, flush=True)")
    assert result.code == 0, result.output
    assert result.stdout.count("over") == 3


@pytest.mark.library
@pytest.mark.short
def test_a_deadlock(tmp_path: Path) -> None:
    """Behaviour 32: all wait, in calls that do not match; each is shown."""
    result = run(tmp_path, "if world.rank == 1: world.broadcast(1)")
    assert result.code == 1
    assert "all ranks wait for each other" in result.output
    assert "ranks 0, 2 wait in Allreduce" in result.output
    assert f"rank 1 ({HOST}) waits in bcast" in result.output


@pytest.mark.library
def test_a_rank_that_holds_the_lock_of_python(tmp_path: Path) -> None:
    """Behaviour 32: no thread of it can answer, as while a library reads from a file system that hangs."""
    held = "import ctypes\nif world.rank == 1: ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)"
    result = run(tmp_path, held, abort=8.0)
    assert result.code == 1
    assert f"rank 1 on {HOST} does not answer" in result.output
    assert "its process sleeps in a call that holds Python's lock" in result.output
    assert "script.py" in result.output.partition("holds Python's lock")[2]


def test_a_rank_that_is_late(tmp_path: Path) -> None:
    """Behaviour 32: the report comes, the job goes on, and that is said as well."""
    result = run(tmp_path, "if world.rank == 1: time.sleep(4)", abort=600.0)
    assert result.code == 0, result.output
    assert result.output.count("does not arrive") == 1
    assert result.stdout.count("end of rank") == 3


def test_waiting_for_ever_may_be_wanted(tmp_path: Path) -> None:
    """Behaviour 32: 0 is never, for both limits."""
    result = run(tmp_path, "if world.rank == 1: time.sleep(4)", warning=0.0, abort=0.0)
    assert result.code == 0, result.output
    assert "stalled" not in result.output


def test_a_long_phase_is_excused(tmp_path: Path) -> None:
    """Behaviour 32: a rank may say that the others have to wait for it."""
    code = "if world.rank == 1:\n    with world.status.during('copying', is_long=True): time.sleep(12)"
    result = run(tmp_path, code, abort=2.0)  # the others would end the job after 8 s, if nobody watched
    assert result.code == 0, result.output
    assert "stalled" not in result.output


def test_a_rank_that_is_stopped_in_a_long_phase(tmp_path: Path) -> None:
    """Behaviour 32: it does not take long, it does nothing."""
    result = run(tmp_path, f"with world.status.during('reading', is_long=True):\n    {STOP.format(rank=1)}")
    assert result.code == 1
    assert "phase reading; its process is stopped (SIGSTOP" in result.output
    assert "The job ends (stall_abort_s = 4)." in result.output


def test_a_long_phase_is_announced(tmp_path: Path) -> None:
    """Behaviour 32: what comes next may hold Python's lock from its first moment, and nobody is told any more."""
    code = """
from itertools import repeat
if world.rank == 1:
    start = time.perf_counter()
    sum(repeat(1, 10**7))
    number = int(12 * 10**7 / (time.perf_counter() - start))
    with world.status.during('reading', is_long=True): sum(repeat(1, number))
"""
    result = run(tmp_path, code, abort=2.0)
    assert result.code == 0, result.output
    assert "The job ends (" not in result.output


@pytest.mark.library
def test_a_job_that_was_suspended_goes_on(tmp_path: Path) -> None:
    """Behaviour 32: time in which the ranks were all stopped does not count."""
    code = """
import subprocess
pids = world.comm.allgather(os.getpid())
if world.rank == 0:
    words = " ".join(map(str, pids))
    subprocess.Popen(["sh", "-c", f"kill -STOP {words}; sleep 6; kill -CONT {words}"], start_new_session=True)
    time.sleep(2)
"""
    result = run(tmp_path, code, warning=0.0, abort=4.0)
    assert result.code == 0, result.output
    assert "stalled" not in result.output
