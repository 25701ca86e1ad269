"""The job scripts as text: bash and shellcheck take them, and a site finds the lines it changes (Behaviour 49)."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

JOBS = Path(__file__).parents[2] / "jobs"
SLURM = sorted(JOBS.glob("*.sbatch"))
SCRIPTS = [*SLURM, *sorted(JOBS.glob("*.sh"))]
SITE_OPTIONS = ("--ntasks-per-node", "--gpus-per-node", "--cpus-per-task", "--partition", "--account")


def shellcheck() -> str:
    beside = Path(sys.executable).parent / "shellcheck"
    found = str(beside) if beside.exists() else shutil.which("shellcheck")
    return found or pytest.skip("shellcheck is not installed; it is part of the extra lint")


@pytest.mark.job
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_and_shellcheck(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    done = subprocess.run([shellcheck(), script], stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_short_and_ends_with_the_programs_code(script: Path) -> None:
    lines = script.read_text().splitlines()
    assert len(lines) < 50
    assert lines[-1] == 'exit "$code"'
    assert "|| code=$?" in script.read_text()


@pytest.mark.parametrize("script", SLURM, ids=lambda path: path.name)
def test_slurm_scripts(script: Path) -> None:
    """They hand on cores, bind no GPUs, and every line that a site changes says so."""
    text = script.read_text()
    assert "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK" in text
    assert "export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK" in text
    assert "srun -K --mpi=" in text
    assert not re.search(r"--gpus-per-task|--gpu-bind", text)
    for line in text.splitlines():
        if line.lstrip("#").startswith("SBATCH ") and any(option in line for option in SITE_OPTIONS):
            assert "# SITE: " in line, line
