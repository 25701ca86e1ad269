"""`mpidp.Checkpoints` on several ranks: optimizers in shards, and ranks that ask for different things."""

import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import mpidp
from mpidp.errors import CheckpointError, MismatchError

pytestmark = pytest.mark.mpi


@pytest.fixture
def data(world: mpidp.World, mpi_tmp_path: Path) -> Path:
    path = mpi_tmp_path / "data.h5"
    if world.rank == 0:
        with h5py.File(path, "w") as file:
            file["x"] = np.random.default_rng(0).standard_normal((60, 100)).astype(np.float32)
    world.barrier()
    return path


def make_state(world: mpidp.World, data: Path) -> mpidp.TrainState:
    torch.manual_seed(0)
    model = mpidp.DataParallel(torch.nn.Linear(100, 3), world, compare_steps=0)
    optimizer = mpidp.ShardedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), world)
    loader = mpidp.HDF5Loader(data, ("x",), global_batch=12, world=world)
    return mpidp.TrainState(model, optimizer, loader)


def train(state: mpidp.TrainState, checkpoints: mpidp.Checkpoints, steps: int) -> list[float]:
    losses: list[float] = []
    while True:
        for batch in state.loader:
            loss = torch.nn.functional.dropout(state.model(batch.x)).square().mean()
            batch.weigh(loss).backward()
            state.optimizer.step()
            state.optimizer.zero_grad()
            checkpoints.step()
            losses.append(loss.item())
            if len(losses) == steps:
                return losses


def test_an_optimizer_in_shards_and_dropout_go_on(world: mpidp.World, data: Path, mpi_tmp_path: Path) -> None:
    """Behaviours 21 and 43: the same losses on each rank, and the same parameters, behind a step inside an epoch."""
    folder = mpi_tmp_path / "run"
    state = make_state(world, data)
    with mpidp.Checkpoints(folder, state, every_steps=3, keep=9) as checkpoints:
        assert not checkpoints.resume()
        expected = train(state, checkpoints, 8)[3:]
    world.barrier()
    if world.rank == 0:
        assert sorted(path.name for path in folder.glob("step_*")) == [f"step_{n:08d}" for n in (3, 5, 6, 8)]
        for path in sorted(folder.glob("step_*"))[1:]:
            shutil.rmtree(path)
    world.barrier()
    again = make_state(world, data)
    with mpidp.Checkpoints(folder, again, every_epochs=0) as checkpoints:
        assert checkpoints.resume()
        assert (again.step, again.epoch, again.loader.position) == (3, 0, 36)
        assert train(again, checkpoints, 5) == expected
    for name, value in state.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value)


def test_ranks_that_ask_for_different_things(world: mpidp.World, data: Path, mpi_tmp_path: Path) -> None:
    """Behaviour 33."""
    if world.size == 1:
        pytest.skip("one rank agrees with itself")
    with pytest.raises(MismatchError, match="every_steps=0"):
        mpidp.Checkpoints(mpi_tmp_path, make_state(world, data), every_steps=int(world.rank == 1))


def test_what_only_one_rank_sees_is_refused_on_all(world: mpidp.World, data: Path, mpi_tmp_path: Path) -> None:
    """Behaviour 41: a checkpoint without any usable file, and one that nobody asked for."""
    folder = mpi_tmp_path / "run"
    if world.rank == 0:
        (folder / "step_00000003").mkdir(parents=True)
    world.barrier()
    state = make_state(world, data)
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        mpidp.Checkpoints(folder, state).resume()
