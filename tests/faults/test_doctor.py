"""`mpidp doctor` on several ranks, with the right launcher and a wrong one; what it checks when a job starts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny import make_workplace

from jobs import ROOT, Result, run_job

PRINT = "import mpidp; world = mpidp.init(); print(f'rank {world.rank} of {world.size}\\n', end='', flush=True)\n"
PINNED = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"


def doctor(ranks: int, *words: str, environment: dict[str, str] | None = None) -> Result:
    """Run doctor on so many ranks."""
    return run_job(["-m", "mpidp", "doctor", *words], ranks, 60.0, environment=environment)


def json_line(result: Result) -> dict[str, object]:
    """Return the report: one rank prints, and once."""
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("{"))
    found: dict[str, object] = json.loads(line)
    return found


def codes(report: dict[str, object], level: str) -> set[str]:
    """Return the codes of that level."""
    findings = report["findings"]
    assert isinstance(findings, list)
    return {finding["code"] for finding in findings if finding["level"] == level}


def test_ranks_are_compared() -> None:
    """Behaviour 46: facts of all ranks in one report."""
    result = doctor(3, "--json")
    assert result.code == 0, result.output
    report = json_line(result)
    assert isinstance(report["ranks"], list)
    assert [facts["launch"]["rank"] for facts in report["ranks"]] == [0, 1, 2]
    assert {facts["mpi"]["size"] for facts in report["ranks"]} == {3}
    assert not codes(report, "FAIL")


def test_a_failure_is_said_once_and_is_the_jobs_exit_code(tmp_path: Path) -> None:
    """Behaviour 46: exit code 3, under a launcher too."""
    result = doctor(3, str(tmp_path / "no.h5"))
    assert result.code == 3, result.output
    assert result.stdout.count("FAIL  data") == 1
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "environment",
    [
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"},
        {
            "SLURM_JOB_ID": "9",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
        },
    ],
    ids=["mpiexec", "srun"],
)
def test_every_rank_is_0_of_1(environment: dict[str, str]) -> None:
    """Behaviour 37: rank 0 of the launcher says so; the others keep silent."""
    result = doctor(0, environment=environment)
    assert result.code == 3, result.output
    assert result.stdout.count("FAIL  launch.size") == 1
    other = {name: "2" if value == "0" and name != "SLURM_STEP_ID" else value for name, value in environment.items()}
    silent = doctor(0, environment=other)
    assert (silent.code, silent.stdout) == (0, "")


def test_masks_of_ranks_are_compared() -> None:
    """Behaviour 38: all ranks on one core."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core is all there is")
    result = run_job(["-c", PINNED + "import sys; from mpidp.cli import main; sys.exit(main(['doctor']))"], 2, 60.0)
    assert result.code == 3, result.output
    assert result.stdout.count("FAIL  cores.same") == 1
    assert "SRUN_CPUS_PER_TASK" in result.stdout


def test_the_probe_on_two_ranks() -> None:
    """Behaviours 46, 47."""
    result = doctor(2, "--probe", "--json")
    assert result.code == 0, result.output
    report = json_line(result)
    assert {"probe.reduction", "probe.step", "probe.checkpoint"} <= codes(report, "OK") | codes(report, "WARN")


@pytest.mark.parametrize("ranks", [0, 2])
def test_more_threads_than_cores_are_said_once_when_a_job_starts(ranks: int) -> None:
    """Behaviour 38: with the fix; and the job goes on."""
    result = run_job(["-c", PINNED + PRINT], ranks, environment={"OMP_NUM_THREADS": "2"})
    assert result.code == 0, result.output
    assert result.stderr.count("UserWarning: rank 0") == 1
    assert "with 2 threads, but may run on 1 core only" in result.stderr and "OMP_NUM_THREADS=1" in result.stderr


def test_threads_of_the_run_file_count_too(tmp_path: Path) -> None:
    """Behaviour 38: `train.threads`, which wins over the variable."""
    make_workplace(tmp_path)
    train = "import sys; from mpidp.cli import main; sys.exit(main(['train', 'run.toml', '--train.threads=3']))"
    result = run_job(["-c", PINNED + train], 0, 60.0, cwd=tmp_path, environment={"PYTHONPATH": str(ROOT)})
    assert result.code == 0, result.output
    assert result.stderr.count("with 3 threads, but may run on 1 core only") == 1


def test_ranks_on_one_core_are_said_once_when_a_job_starts() -> None:
    """Behaviour 38."""
    if (os.cpu_count() or 1) < 2:
        pytest.skip("one core is all there is")
    result = run_job(["-c", PINNED + PRINT], 2)
    assert result.code == 0, result.output
    assert result.stderr.count("UserWarning: ranks 0, 1 on") == 1
    assert "all pinned to the same core" in result.stderr


def test_ranks_that_fit_hear_nothing() -> None:
    """Behaviour 38."""
    result = run_job(["-c", PRINT], 2)
    assert (result.code, result.stderr) == (0, ""), result.output


def test_a_second_mpi_library_stops_the_job(tmp_path: Path) -> None:
    """A torch or h5py that was built with another MPI: an error that names both, instead of a crash."""
    library = make_library(tmp_path, "libmpi.so.77")
    result = run_job(["-c", f"import ctypes; ctypes.CDLL({str(library)!r})\n{PRINT}"], 2)
    assert result.code != 0
    assert "rank 0 of" not in result.stdout
    assert "LaunchError: 2 MPI libraries are in this process" in result.stderr and str(library) in result.stderr


def make_library(folder: Path, name: str) -> Path:
    """Compile a library with nothing in it."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    words: Sequence[str | Path] = [compiler, "-shared", "-o", folder / name, "-x", "c", "/dev/null"]
    subprocess.run(words, check=True)
    return folder / name


def test_a_launcher_that_would_stop_this_library_in_its_own_words() -> None:
    """Behaviour 37: Open MPI's launcher, another library: said before MPI is started, by doctor and by a job."""
    environment = {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "4",
        "PMIX_NAMESPACE": "prterun-1",
        "PMIX_RANK": "0",
        "PMIX_SERVER_URI41": "nothing",
    }
    from mpi4py import MPI

    if "MPICH" not in MPI.Get_library_version():
        pytest.skip("this library is Open MPI's")
    result = doctor(0, environment=environment)
    assert result.code == 3
    assert "FAIL  launch.size" in result.stdout and "speaks PMIx" in result.stdout
    assert "Abort" not in result.stderr
    job = run_job(["-c", PRINT], 0, environment=environment)
    assert job.code == 1
    assert "LaunchError: Open MPI's mpiexec started 4 processes and speaks PMIx" in job.stderr
