"""Ctrl-C: SIGINT to the launcher, and from a terminal to its whole process group; the job ends with one line."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from shrink_job import has_ulfm
from tiny import make_workplace

from jobs import Result, finish, launch, run_job

pytestmark = pytest.mark.library
by_launcher = pytest.mark.skipif(
    has_ulfm(), reason="Open MPI's mpiexec answers SIGINT itself: it kills all ranks at once and passes nothing on"
)
LOOP = """
import sys, time
from pathlib import Path
import mpidp
world = mpidp.init()
Path(sys.argv[1], f"ready_{world.rank}").touch()
"""
SITES = {
    "in Python": "while True: time.sleep(0.01)",
    "in MPI": "world.comm.recv(source=1, tag=5) if world.rank == 0 else world.broadcast(1)",
    "some in MPI": "if world.rank == 0: world.comm.recv(source=1, tag=5)\nwhile True: time.sleep(0.01)",
    "in MPI of its own": "from mpi4py import MPI\nMPI.COMM_WORLD.recv(source=1 - world.rank, tag=5)",
}


def interrupt(folder: Path, words: list[str | Path], ranks: int = 2, whole_group: bool = True) -> Result:
    """Press Ctrl-C when all ranks are ready."""
    job = launch(words, ranks, cwd=folder)
    deadline = time.monotonic() + 60
    while len(list(folder.glob("ready_*"))) < max(1, ranks):
        assert job.poll() is None and time.monotonic() < deadline, finish(job).output
        time.sleep(0.05)
    time.sleep(0.5)
    os.killpg(job.pid, signal.SIGINT) if whole_group else job.send_signal(signal.SIGINT)
    return finish(job)


def lines(result: Result) -> list[str]:
    """What ranks say; launchers, and MPI's abort, have words of their own."""
    said = ("[rank ", "mpidp:", "Traceback", "  File", "Exception")
    return [line for line in result.stderr.splitlines() if line.startswith(said)]


@by_launcher
@pytest.mark.parametrize(("site", "whole_group"), [*((site, True) for site in SITES), ("in MPI", False)])
def test_a_loop_of_ones_own(tmp_path: Path, site: str, whole_group: bool) -> None:
    """Behaviour 30: also when no rank runs Python, and nobody could raise KeyboardInterrupt."""
    result = interrupt(tmp_path, ["-c", LOOP + SITES[site], tmp_path], whole_group=whole_group)
    assert result.code == 130, result.output
    (line,) = lines(result)
    assert line.startswith("[rank ") and line.endswith("interrupted")


@by_launcher
def test_a_program_that_catches_it(tmp_path: Path) -> None:
    """It is the program's: also when its handling takes longer than a call may."""
    code = LOOP + "try: time.sleep(60)\nexcept KeyboardInterrupt: time.sleep(7); print('caught', flush=True)"
    result = interrupt(tmp_path, ["-c", code, tmp_path])
    assert result.code == 0 and result.stdout.count("caught") == 2, result.output
    assert not lines(result)


@pytest.mark.short
def test_one_rank_is_interrupted(tmp_path: Path) -> None:
    """It is named, and the others end, too."""
    code = LOOP + "import os, signal\nif world.rank == 1: os.kill(os.getpid(), signal.SIGINT)\nworld.barrier()"
    result = run_job(["-c", code, tmp_path], 2)
    assert result.code == 130
    (line,) = lines(result)
    assert line.startswith("[rank 1 of 2 on ") and line.endswith("interrupted")


def test_a_child_that_is_ended_is_no_signal_to_this_rank() -> None:
    """Of processes that a rank has forked, such as a pool of workers."""
    code = """
import os, signal, time
import mpidp
world = mpidp.init()
child = os.fork()
if child == 0:
    while True: time.sleep(1)
time.sleep(0.5)
os.kill(child, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
time.sleep(3)
world.barrier()
"""
    result = run_job(["-c", code], 2)
    assert result.code == 0, result.output


SLOW = """
import time
from pathlib import Path
import own

class Net(own.Net):
    def forward(self, x):
        if self.step >= 8:
            Path(f"ready_{own.RANK}").touch()
            time.sleep(0.2)
        return super().forward(x)
"""


@pytest.mark.parametrize(("ranks", "every"), [(0, 0), pytest.param(2, 1, marks=by_launcher)])
def test_a_run_names_its_newest_checkpoint(tmp_path: Path, ranks: int, every: int) -> None:
    """With the words that continue it, or that there is none."""
    (make_workplace(tmp_path) / "slow.py").write_text(SLOW)
    words = ["-m", "mpidp", "train", "run.toml", "--model.name=slow:Net", f"--checkpoint.every_epochs={every}"]
    result = interrupt(tmp_path, list(words), ranks)
    assert result.code == 130, result.output
    (line,) = lines(result)
    assert "interrupted" in line and "Traceback" not in result.output
    if every:
        assert line.endswith("checkpoint is runs/run/checkpoints/step_00000006. Continue with --resume runs/run")
        resumed = run_job([*words[:3], "run.toml", "--resume", "runs/run"], ranks, 60, cwd=tmp_path)
        assert resumed.code == 0 and "mpidp: resumed from runs/run" in resumed.stderr, resumed.output
    else:
        assert line.endswith("; there is no checkpoint yet")
