"""What survivors of a loss make anew from memory, here with nobody lost (behaviour 31); tests/faults kills ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import mpidp
from mpidp.errors import MpidpError
from mpidp.train.elastic import Elastic, _Agreed, _Held

DIGITS = Path(__file__).parents[2] / "data" / "digits.h5"


def make(world: mpidp.World, is_sharded: bool, seed: int) -> mpidp.TrainState:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    model = mpidp.DataParallel(module, world)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if is_sharded:
        optimizer = mpidp.ShardedOptimizer(optimizer, world, copies=2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    loader = mpidp.HDF5Loader(DIGITS, ("x", "y"), 120, world=world)
    return mpidp.TrainState(model, optimizer, loader, scheduler)


def losses(state: mpidp.TrainState, steps: int, elastic: Elastic) -> list[float]:
    """Of so many steps, over all ranks."""
    found: list[float] = []
    for batch in state.loader:
        loss = batch.weigh(nn.functional.cross_entropy(state.model(batch.x.float()), batch.y))
        loss.backward()
        elastic.agree()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.scheduler.step()  # type: ignore[union-attr]
        state.step += 1
        found.append(state.world.mean(loss.item()))
        if len(found) == steps:
            break
    return found


@pytest.mark.mpi
@pytest.mark.parametrize("is_sharded", [False, True], ids=["plain", "sharded"])
def test_a_step_that_was_broken_off_leaves_no_trace(world: mpidp.World, is_sharded: bool) -> None:
    """Samples that it had come again, statistics of batch norm are those of the steps that were taken."""
    elastic = Elastic(world)
    untroubled = make(world, is_sharded, seed=0)
    expected = losses(untroubled, 9, elastic)[5:]

    state = make(world, is_sharded, seed=0)
    assert not elastic.restore(state)
    losses(state, 5, elastic)
    agreed = _Agreed.of(state)
    state.model(next(iter(state.loader)).x.float())
    with pytest.raises(MpidpError, match=r"step 5 follows step 3 .* load a checkpoint before restore"):
        _Held.of(state, replace(agreed, step=3))
    held = _Held.of(state, agreed)
    held = replace(held, saved=held.saved | {"ranks": world.size + 1})
    for seed in (1, 2):  # twice, as one more may die before all have gone on
        state = make(world, is_sharded, seed)
        held = held.restored_to(state)
    assert (state.step, state.loader.position) == (5, 600)
    statistics = torch.cat([buffer.flatten().double() for buffer in state.model.module.buffers()])
    assert all(torch.equal(statistics, of_rank) for of_rank in world.comm.allgather(statistics))
    assert not torch.equal(statistics[:32], torch.zeros(32, dtype=torch.float64))
    assert losses(state, 4, elastic) == expected
    if world.size == 1:  # of several ranks they are combined once more than in the training without troubles
        assert same(state.model.state_dict(), untroubled.model.state_dict())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())
