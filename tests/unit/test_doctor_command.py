"""`mpidp doctor` as a command: what it prints, its exit codes, and what it does not import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import h5py
import pytest

from mpidp.cli import main

pytestmark = pytest.mark.job

ROOT = Path(__file__).parents[2]
FINDING = {"level": str, "code": str, "text": str, "fix": str, "where": str}


def doctor(
    *words: str, environment: dict[str, str] | None = None, python: str | Path = sys.executable
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    variables = {**os.environ, **(environment or {})}
    command = [python, "-m", "mpidp", "doctor", *words]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=60)


def test_alone_it_starts_no_mpi_and_imports_neither_torch_nor_h5py() -> None:
    """Behaviours 40, 46: no GPU, Slurm, launcher, and something useful. An h5py built with MPI would start MPI."""
    script = (
        "import sys\nfrom mpidp.cli import main\nassert main(['doctor']) == 0\n"
        "print([name for name in ('torch', 'h5py', 'mpi4py', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    *findings, counts, imported = done.stdout.splitlines()
    assert counts.startswith("0 FAIL, ") and imported == "[]"
    codes = [line.split()[1] for line in findings if not line.startswith(" ")]
    assert {"versions", "launch", "mpi", "node", "cores", "memory", "memory.shm", "gpus", "hdf5"} <= set(codes)


def test_json_has_findings_and_facts(tmp_path: Path) -> None:
    """Behaviour 46: `--json` is one line, and its shape holds."""
    with h5py.File(tmp_path / "a.h5", "w"):
        pass
    done = doctor(str(tmp_path / "a.h5"), "--json")
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert (done.returncode, done.stderr) == (0, "")
    assert set(found) == {"format", "level", "findings", "ranks", "measured"}
    assert (found["format"], found["measured"], len(found["ranks"])) == (1, None, 1)
    assert found["level"] in ("OK", "WARN")
    for finding in found["findings"]:
        assert {name: type(value) for name, value in finding.items()} == FINDING
        assert finding["level"] == "OK" or finding["fix"]
    (rank,) = found["ranks"]
    assert {"launch", "environment", "versions", "cores", "memory", "gpus", "system", "mpi", "hdf5"} <= set(rank)


def test_a_failure_is_exit_code_3(tmp_path: Path) -> None:
    """Behaviour 46: a file that is not there, and one that HDF5 cannot open."""
    done = doctor(str(tmp_path / "no.h5"))
    assert done.returncode == 3
    assert "FAIL  data" in done.stdout and "No such file" in done.stdout and "1 FAIL" in done.stdout
    (tmp_path / "a.h5").write_text("not HDF5")
    done = doctor(str(tmp_path / "a.h5"), "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["level"]) == (3, "FAIL")
    assert "data.hdf5" in {finding["code"] for finding in found["findings"] if finding["level"] == "FAIL"}


def test_where_nothing_is_installed(tmp_path: Path) -> None:
    """Behaviours 40, 46: it says what is missing, and the rest all the same."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    done = doctor(python=tmp_path / "venv" / "bin" / "python")
    assert done.returncode == 3, done.stderr
    assert "pip install torch mpi4py numpy h5py" in done.stdout
    assert "mpi4py is not installed" in done.stdout
    assert "FAIL  hdf5" in done.stdout and "No module named 'h5py'" in done.stdout
    assert "OK    memory " in done.stdout and "Traceback" not in done.stderr


def test_where_mpi4py_finds_no_library() -> None:
    """Behaviour 46: 'cannot load MPI library'."""
    done = doctor(environment={"MPI4PY_LIBMPI": "/nothing/libmpi.so", "MPI4PY_MPIABI": "mpich"})
    assert done.returncode == 3
    assert "FAIL  mpi" in done.stdout and "MPI4PY_LIBMPI" in done.stdout


def test_a_log_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log").write_text("step 1\nRuntimeError: cannot load MPI library\n")
    assert main(["doctor", "--log", str(tmp_path / "log")]) == 3
    assert "line 2" in capsys.readouterr().out
    (tmp_path / "log").write_text("mca_base_component_repository_open: unable to open x\n")
    assert main(["doctor", "--log", str(tmp_path / "log"), "--json"]) == 0
    assert "safe to ignore" in json.loads(capsys.readouterr().out)["findings"][0]["text"]
    assert main(["doctor", "--log", str(tmp_path / "none")]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err


def test_the_probe_measures_with_right_values() -> None:
    """Behaviours 46, 47: a step, a checkpoint and copies, in a child process."""
    done = doctor("--probe", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0, found
    assert {"probe.copy", "probe.step", "probe.checkpoint"} <= {finding["code"] for finding in found["findings"]}
    assert found["measured"]["copy_s"] > 0 and found["measured"]["step_s"] > 0
    assert not list(ROOT.glob(".mpidp-doctor-*"))


def test_one_way_to_print(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--markdown"]) == 2
    assert "give one of them" in capsys.readouterr().err
