"""Which world a loader takes that is given none."""

import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpidp.errors import LaunchError
from mpidp.world.launch import current_world
from mpidp.world.world import World, resolve_world


@pytest.mark.parametrize("size", ["1", "3"])
@pytest.mark.parametrize("made", [None, object()])
def test_the_world_that_init_made(made: object, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behaviour 33: several processes without one would all take all samples."""
    monkeypatch.setattr("mpidp.world.launch._world", made)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", size)
    other: object = object()
    assert current_world() is made
    assert resolve_world(other, "a loader") is other  # type: ignore[arg-type]
    if made or size == "1":
        found = resolve_world(None, "a loader")
        assert found is made if made else (found.size, found.host) == (1, World.alone().host)
        return
    text = r"a loader was made before mpidp\.init\(\) in a job of 3 processes \(Open MPI's mpiexec\).*World\.alone\(\)"
    with pytest.raises(LaunchError, match=text):
        resolve_world(None, "a loader")


@pytest.mark.job
def test_a_world_of_one_process() -> None:
    """What a loop asks of a world is what this process says; without MPI, which nothing asks for."""
    program = """
import pickle, sys, torch
from mpidp.world.world import World

world = World.alone()
assert (world.rank, world.size, world.local_rank, world.local_size, world.num_nodes) == (0, 1, 0, 1, 1)
assert world.cores >= 1 and world.host and str(world.device) == "cpu" and World.alone("meta").device.type == "meta"
assert world.any(True) and not world.all(False) and world.sum([1.5, 2]) == [1.5, 2.0] and world.sum_on_node(3) == 3
assert world.mean(2.0, 3) == 2 and world.broadcast("x") == "x" and world.call_on_root(lambda: 5) == 5
world.barrier(1.0)
loss = torch.tensor(2.0)
assert world.weigh(loss, 7) is loss
try:
    with world.raise_on_all_ranks("trying"):
        raise ValueError("on purpose")
except ValueError as error:
    assert error.__notes__ == [f"on rank 0 of 1 ({world.host}), trying"]
assert "no MPI" in repr(world) and pickle.loads(pickle.dumps(world)).rank == 0
assert not [name for name in sys.modules if name.startswith("mpi4py")]
assert world.gather_rows(torch.tensor([5.0, 7.0]), [9, 4]).tolist() == [7.0, 5.0]
try:
    world.comm.Dup()
except Exception as error:
    print(error)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("World.alone() has no MPI, so it has no Dup")


@pytest.mark.job
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
