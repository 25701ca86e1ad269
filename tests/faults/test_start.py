"""Ways in which a job is started, right and wrong: without a launcher, with another one's, and with MPI running."""

import os
import subprocess
import sys

import pytest
from shrink_job import has_ulfm

from jobs import ROOT, mpiexec, run_job

# One string is one write: the launcher mixes what several ranks write in parts.
INIT = "import mpidp; world = mpidp.init(); print(f'rank {world.rank} of {world.size}\\n', end='', flush=True)\n"
BY_USER = "import mpi4py; mpi4py.rc.thread_level = {level!r}; from mpi4py import MPI; assert MPI.Is_initialized()\n"


@pytest.mark.short
def test_without_a_launcher_it_is_a_world_of_one() -> None:
    """Behaviour 6: training gives the bits of plain torch."""
    result = run_job(
        [
            "-c",
            INIT
            + """
import torch
torch.manual_seed(0)
plain = torch.nn.Linear(5, 3)
model = torch.nn.Linear(5, 3)
model.load_state_dict(plain.state_dict())
wrapped = mpidp.DataParallel(model, world)
x = torch.randn(4, 5)
for each in (plain, wrapped):
    optimizer = torch.optim.AdamW(each.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        each(x).square().mean().backward()
        optimizer.step()
assert all(map(torch.equal, plain.parameters(), wrapped.parameters()))
""",
        ],
        0,
    )
    assert result.code == 0, result.output
    assert "rank 0 of 1" in result.stdout


WRONG_LAUNCHERS = {
    "Open MPI's mpiexec": {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"},
    "Slurm's srun": {
        "SLURM_JOB_ID": "9",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_PROCID": "2",
        "SLURM_LOCALID": "2",
    },
}


@pytest.mark.parametrize("launcher", WRONG_LAUNCHERS)
def test_a_launcher_that_this_mpi_does_not_understand(launcher: str) -> None:
    """Behaviour 37: instead of every process training alone."""
    result = run_job(["-c", INIT], 0, environment=WRONG_LAUNCHERS[launcher])
    assert result.code == 1
    assert "rank 0 of 1" not in result.stdout
    assert f"LaunchError: {launcher} started 4 processes, but MPI sees 1" in result.stderr
    assert ("srun --mpi=pm" if "srun" in launcher else "mpiexec that belongs to this library") in result.stderr


def test_a_batch_script_is_one_process() -> None:
    """Behaviour 37: `python train.py` in an allocation of 4 tasks, without srun."""
    environment = {"SLURM_JOB_ID": "9", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    result = run_job(["-c", INIT], 0, environment=environment)
    assert result.code == 0, result.output
    assert "rank 0 of 1" in result.stdout


@pytest.mark.parametrize("level", ["multiple", "serialized"])
def test_mpi_started_earlier_by_the_user(level: str) -> None:
    """Behaviour 39: and it goes on working for the user."""
    result = run_job(["-c", BY_USER.format(level=level) + INIT + "assert MPI.COMM_WORLD.allreduce(1) == 2"], 2)
    assert result.code == 0, result.output
    assert sorted(result.stdout.split("\n"))[-2:] == ["rank 0 of 2", "rank 1 of 2"]


@pytest.mark.parametrize("starts", ["", "from mpidp.world.mpi import MPI; MPI.Init_thread()"])
def test_a_program_that_splits_its_ranks(starts: str) -> None:
    """Behaviours 9, 36 and 39: some train, one does something else for longer than the others may wait at their end."""
    program = """
from mpi4py import MPI
import mpidp, time
trains = MPI.COMM_WORLD.rank != 1
group = MPI.COMM_WORLD.Split(int(trains))
if trains:
    world = mpidp.init(group, stall_warning_s=0.5, stall_abort_s=1)
    assert (world.rank, world.size) == (MPI.COMM_WORLD.rank // 2, 2) and mpidp.init(group) is mpidp.init() is world
    assert mpidp.shares(6, 2).world is world and world.sum([1]) == [2]
    try:
        mpidp.init(MPI.COMM_WORLD)
    except mpidp.errors.LaunchError as error:
        assert "another communicator" in str(error)
        print(f"rank {world.rank} of {world.size}\\n", end="", flush=True)
else:
    time.sleep(4)
    print("done\\n", end="", flush=True)
"""
    result = run_job(["-c", starts + program], 3)
    assert result.code == 0, result.output
    assert sorted(result.stdout.splitlines()) == ["done", "rank 0 of 2", "rank 1 of 2"]


@pytest.mark.parametrize(("level", "ranks"), [("funneled", 0), ("single", 2)])
def test_too_low_a_thread_level(level: str, ranks: int) -> None:
    """Behaviour 39: an error that says what was found, what is needed, and two ways out."""
    result = run_job(["-c", BY_USER.format(level=level) + INIT], ranks)
    assert result.code != 0
    assert "rank 0 of" not in result.stdout
    for part in (
        "LaunchError",
        f"MPI_THREAD_{level.upper()}",
        "MPI_THREAD_SERIALIZED",
        "mpidp.init()",
        "Init_thread(MPI.THREAD_MULTIPLE)",
    ):
        assert part in result.stderr


@pytest.mark.parametrize(
    "size, settings, words",
    [
        ("1m", {}, "/dev/shm has 1,048,576 bytes, and MPICH needs 2,121,728 to start 2 rank(s) here"),
        ("16m", {}, "/dev/shm has 16,777,216 bytes, and MPICH needs "),
        ("4m", {}, ""),
        ("1m", {"MPIR_CVAR_CH4_SHM_POSIX_IQUEUE_NUM_CELLS": "2"}, ""),
        ("16m", {"UCX_TLS": "^posix"}, ""),
    ],
)
def test_little_shared_memory(size: str, settings: dict[str, str], words: str) -> None:
    """Said before MPI dies of a signal, also by doctor, and what it advises works."""
    mount = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"', "sh"]
    if subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("mounting /dev/shm anew needs root")
    for program in (["-c", INIT], ["-m", "mpidp", "doctor"])[: 2 if words else 1]:
        command = [*mount, *mpiexec(2), sys.executable, *program]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **settings}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
        if words and not has_ulfm():  # Open MPI goes on without
            assert words in done.stdout + done.stderr and done.returncode in (1, 3), done.stdout + done.stderr
        else:
            assert done.returncode == 0, done.stdout + done.stderr
