"""`mpidp data verify` as a job: what a user sees under mpiexec."""

import json
import sys
from pathlib import Path

import pytest

from jobs import run_job

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from bad_data import damage, write_sound

RANKS = 2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_sound(tmp_path / "in.h5")


def test_a_finding_is_exit_code_1_and_is_said_once(path: Path) -> None:
    damage(path, [5, 30])
    job = run_job(["-m", "mpidp", "data", "verify", path, "--json"], RANKS)
    assert job.code == 1
    (file,) = json.loads(job.stdout)["files"]
    assert [finding["rows"] for finding in file["findings"]] == [[100, 149], [750, 799]]
    assert "Traceback" not in job.output and "left the job" not in job.output


def test_a_sound_file_is_exit_code_0(path: Path) -> None:
    job = run_job(["-m", "mpidp", "data", "verify", path], RANKS)
    assert (job.code, job.stdout.count("read: sound")) == (0, 1), job.output


def test_a_file_that_is_not_there(path: Path) -> None:
    """Behaviour 29: one message for all ranks."""
    job = run_job(["-m", "mpidp", "data", "verify", "gone.h5"], RANKS)
    assert (job.code, job.output.count("no such file")) == (1, 1), job.output


def test_convert_asks_to_be_started_alone(path: Path) -> None:
    job = run_job(["-m", "mpidp", "data", "convert", path, path.with_name("out.h5")], RANKS)
    assert (job.code, job.stderr.count("start it without mpiexec")) == (2, 1), job.output
