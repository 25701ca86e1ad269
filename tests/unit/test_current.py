"""Which world a loader takes that is given none."""

import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpidp.errors import LaunchError
from mpidp.world import current
from mpidp.world.current import current_world, resolve_world

HERE: object = object()


@pytest.fixture(params=[None, HERE])
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> object:
    """What `init` made, if it was called."""
    monkeypatch.setattr(current, "_world", request.param)
    return request.param


def test_the_world_that_init_made(made: object) -> None:
    other: object = object()
    assert current_world() is made
    assert resolve_world("current", "a loader") is made
    assert resolve_world(other, "a loader") is other  # type: ignore[arg-type]
    assert resolve_world(None, "a loader") is None


@pytest.mark.parametrize("size", ["1", "3"])
def test_several_processes_without_init(made: object, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behaviour 33: they would all take all samples."""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", size)
    assert resolve_world(None, "a loader") is None
    if made is HERE or size == "1":
        assert resolve_world("current", "a loader") is made
        return
    text = r"a loader was made before mpidp\.init\(\) in a job of 3 processes \(Open MPI's mpiexec\)"
    with pytest.raises(LaunchError, match=text):
        resolve_world("current", "a loader")


def test_a_loader_refuses_in_one_line_and_without_mpi(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(8)
    program = (
        "import sys, mpidp\n"
        "try:\n"
        f"    mpidp.HDF5Loader({str(tmp_path / 'a.h5')!r}, ('x',), 4)\n"
        "except mpidp.errors.LaunchError as error:\n"
        "    print(error)\n"
        "assert 'mpi4py' not in sys.modules"
    )
    environment = {**os.environ, "PMI_RANK": "1", "PMI_SIZE": "2"}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60)
    assert ended.returncode == 0, ended.stderr
    (line,) = ended.stdout.splitlines()
    assert line.startswith("an HDF5Loader was made before mpidp.init() in a job of 2 processes (Hydra's mpiexec)")
