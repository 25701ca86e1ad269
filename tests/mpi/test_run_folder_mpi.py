"""Run folders of ranks that stand in folders of their own, and of a job that another one has."""

import json
import os
from pathlib import Path

import pytest

from mpidp.config import RunConfig, RunSection
from mpidp.errors import CheckpointError
from mpidp.train.records.run_folder import RunFolder
from mpidp.world.world import World


def test_ranks_in_folders_of_their_own_share_a_run(
    world: World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative run.folder, and a relative --resume, are those of rank 0."""
    own = mpi_tmp_path / f"rank_{world.rank}"
    own.mkdir()
    monkeypatch.chdir(own)
    config = RunConfig(run=RunSection(folder="runs"))
    created = RunFolder.create(config, world)
    created.close()
    created.release()
    world.barrier()
    again = RunFolder.hold(Path("runs/run"), world)
    again.begin(world)
    again.close()
    again.release()
    world.barrier()
    assert again.path.samefile(mpi_tmp_path / "rank_0/runs/run")
    assert sorted(os.listdir(again.logs)) == [f"rank_{rank:04d}.log" for rank in range(world.size)]
    assert len(json.loads((again.path / "env.json").read_text())) == 2
    assert not (again.path / "owner.json").exists()
    world.barrier()


def test_all_ranks_hear_that_a_folder_is_in_use(world: World, mpi_tmp_path: Path) -> None:
    """Behaviour 54."""
    created = RunFolder.create(RunConfig(run=RunSection(folder=str(mpi_tmp_path))), world)
    created.close()
    world.barrier()
    path = created.path / "owner.json"
    if world.rank == 0:
        path.write_text(json.dumps({**json.loads(path.read_text()), "host": "another.node"}))
    world.barrier()
    with pytest.raises(CheckpointError, match=r"in use by .*another\.node"):
        RunFolder.hold(created.path, world)
    with pytest.raises(CheckpointError, match=r"now belongs to .*another\.node"):
        created.check_owned(world)
    created.release()
    assert path.exists()
    world.barrier()
