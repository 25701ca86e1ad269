"""Ranks that fail, or just end: the job ends within seconds, with the right code, and says who it was."""

import socket
from pathlib import Path

import pytest

from jobs import Result, run_job

pytestmark = pytest.mark.library

START = """
import os, signal, sys, threading, time
import mpidp
world = mpidp.init()
"""
WAIT = "\nworld.sum([1.0])\nworld.barrier()\nprint('end of rank', world.rank, flush=True)\n"


def run(code: str, ranks: int = 3, **environment: str) -> Result:
    return run_job(["-c", START + code + WAIT], ranks, timeout_s=40, environment=environment)


def tag(rank: int, ranks: int = 3) -> str:
    return f"[rank {rank} of {ranks} on {socket.gethostname()}]"


@pytest.mark.short
@pytest.mark.parametrize("rank", [0, 2])
def test_an_exception_ends_the_job(rank: int) -> None:
    """Behaviour 30: the others wait in a collective; the traceback is readable and says whose it is."""
    result = run(f"if world.rank == {rank}: 1 / 0")
    assert result.code == 1
    assert tag(rank) in result.output
    assert result.output.count("ZeroDivisionError: division by zero") == 1
    assert "Traceback" in result.output
    assert "end of rank" not in result.output


def test_an_exception_in_a_helper_thread_ends_the_job() -> None:
    """Behaviour 30: all main threads wait."""
    result = run(
        """
def load():
    raise OSError("the disk is gone")
if world.rank == 1:
    threading.Thread(target=load, name="loader").start()
    time.sleep(60)
"""
    )
    assert result.code == 1
    assert f"{tag(1)} in thread loader" in result.output
    assert "OSError: the disk is gone" in result.output


def test_a_killed_job_leaves_no_shared_memory_behind() -> None:
    """Behaviour 31: neither MPI's own, nor that of windows."""
    result = run(
        """
from mpidp.world.rank_memory import SharedWindow
window = SharedWindow(world.node_comm, 1 << 20)
names = {line.split(maxsplit=5)[-1].split()[0] for line in open("/proc/self/maps") if "/dev/shm/" in line}
print("memory:", *names, flush=True)
world.barrier()
if world.rank == 1: os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    assert result.code != 0
    lines = [line.split()[1:] for line in result.stdout.splitlines() if line.startswith("memory:")]
    names = {name for line in lines for name in line}
    assert names, "there is memory to be left behind"
    assert not [name for name in names if Path(name).exists()]


@pytest.mark.short
@pytest.mark.parametrize(
    "rank, statement", [(1, "sys.exit(7)"), (0, "sys.exit()"), (2, "raise SystemExit('no such file')")]
)
def test_a_rank_that_leaves_while_others_wait(rank: int, statement: str) -> None:
    """Behaviour 30: noticed within seconds, whatever the limits; what is no failure for itself is one for the job."""
    result = run(f"if world.rank == {rank}: {statement}")
    assert result.code == 1
    assert f"mpidp: rank {rank} ({socket.gethostname()}) left the job at step 0, in phase start" in result.output
    assert "wait in Allreduce, at mpidp/world/world.py" in result.output
    assert "end of rank" not in result.output


@pytest.mark.parametrize("condition", ["True", "world.rank == 1"])
def test_leaving_with_a_code_when_nobody_waits(condition: str) -> None:
    """Behaviour 30: the job's exit code is the ranks'."""
    result = run_job(["-c", START + WAIT + f"if {condition}: sys.exit(7)"], 3)
    assert result.code == 7
    assert result.stdout.count("end of rank") == 3
    assert "left the job" not in result.output


def test_an_exit_of_a_thread_ends_the_thread_only() -> None:
    """Behaviour 30: as Python has it."""
    result = run("thread = threading.Thread(target=lambda: sys.exit(7)); thread.start(); thread.join()")
    assert result.code == 0, result.output
    assert result.stdout.count("end of rank") == 3


def test_an_error_of_all_ranks_is_printed_once() -> None:
    """Behaviour 30: with the note that says where it came from."""
    result = run(
        """
with world.raise_on_all_ranks("opening the data"):
    if world.rank == 2:
        raise mpidp.errors.DataError("no file x.h5")
"""
    )
    assert result.code == 1
    assert result.output.count("no file x.h5") == 1
    assert tag(0) in result.output and tag(1) not in result.output and tag(2) not in result.output
    assert f"on rank 2 of 3 ({socket.gethostname()}), opening the data" in result.output


def test_an_interrupt_has_the_code_of_its_signal() -> None:
    """Behaviour 30: 128 + SIGINT."""
    assert run("if world.rank == 1: raise KeyboardInterrupt").code == 130


@pytest.mark.short
def test_a_killed_rank_ends_the_job() -> None:
    """Behaviour 31, without fault tolerance."""
    result = run("if world.rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
    assert result.code != 0
    assert "end of rank" not in result.output


def test_an_exception_at_exit_ends_the_job() -> None:
    """Behaviour 30: in a function that atexit calls, where Python itself would go on and end with 0."""
    result = run("import atexit\nif world.rank == 1: atexit.register(lambda: 1 / 0)")
    assert result.code == 1
    assert f"{tag(1)} in a function called at exit" in result.output
    assert "ZeroDivisionError" in result.output


@pytest.mark.parametrize(
    "error", ["MemoryError()", "torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB')"]
)
def test_no_memory_left(error: str) -> None:
    """Behaviour 30: with what to do."""
    result = run(f"import torch\nif world.rank == 1: raise {error}")
    assert result.code == 1
    assert tag(1) in result.output
    assert "fewer samples at once (train.micro_batch" in result.output


TERMINATED = {
    "in Python": "if world.rank == 1: os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
    "in MPI": "if world.rank == 1: threading.Timer(1, os.kill, (os.getpid(), 15)).start(); world.broadcast(1)",
}


@pytest.mark.parametrize("where", TERMINATED)
def test_sigterm_to_one_rank(where: str) -> None:
    """Behaviour 30: also while the main thread waits inside MPI and runs no signal handler of Python's."""
    result = run(TERMINATED[where])
    assert result.code == 128 + 15
    assert f"{tag(1)} was ended by SIGTERM" in result.output


def test_a_program_of_its_own_mind_about_sigterm() -> None:
    """Behaviour 30: a handler that the user sets is left in peace."""
    result = run(
        """
signal.signal(signal.SIGTERM, lambda number, frame: print("heard", flush=True))
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)
"""
    )
    assert result.code == 0, result.output
    assert result.stdout.count("heard") == 1


LIVE = """
import torch
model = mpidp.DataParallel(torch.nn.Linear(3, 2), world)
model(torch.ones(4, 3)).sum().backward()
loader = iter(mpidp.HDF5Loader("data/digits.h5", ["x", "y"], 30, world=world))
next(loader)
"""


@pytest.mark.parametrize("ranks", [0, 3])
def test_exit_after_success(ranks: int) -> None:
    """Behaviour 36: with a wrapped model, gradients and a loader's thread still there; 0 ranks: no launcher."""
    result = run(LIVE, ranks)
    assert result.code == 0, result.output
    assert result.stdout.count("end of rank") == max(1, ranks)


@pytest.mark.parametrize("ranks", [0, 3])
def test_exit_after_an_exception(ranks: int) -> None:
    """Behaviour 36."""
    result = run(LIVE + "if world.rank == 0: raise RuntimeError('out of luck')", ranks)
    assert result.code == 1
    assert result.output.count("RuntimeError: out of luck") == 1


def test_exit_at_different_times() -> None:
    """Behaviour 36: the last rank still works when the others have ended."""
    result = run_job(["-c", START + "time.sleep(2 * (world.rank == 0)); print('end of rank')"], 3)
    assert result.code == 0, result.output
    assert result.stdout.count("end of rank") == 3


def test_a_rank_whose_loss_goes_past_the_whole_model() -> None:
    """Behaviour 14: no parameter of the second model is used on rank 0; it contributes zero."""
    result = run(
        """
import torch
class Skip(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
    def forward(self, x):
        return x if world.rank == 0 else self.layer(x)
first = mpidp.DataParallel(torch.nn.Linear(3, 3), world)
second = mpidp.DataParallel(Skip(), world)
second(first(torch.ones(2, 3))).sum().backward()
assert second.module.layer.bias.grad is not None
"""
    )
    assert result.code == 0, result.output
