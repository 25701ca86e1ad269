"""Averaged weights and schedules of a run: what they are, on any number of ranks, and after a resume."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name every PyTorch program gives it
from training_runs import CLASSES, assert_resumed_alike, records, run, state_of

import mpidp

DECAY = 0.8


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, CLASSES))


def averages(folder: Path, steps: int) -> dict[str, Tensor]:
    """By hand, from the parameters after each step, which the checkpoints hold."""
    found: dict[str, Tensor] = {}
    for step in range(1, steps + 1):
        for name, tensor in state_of(folder, step)["model"].items():
            is_buffer = "running" in name or "batches" in name
            found[name] = tensor if step == 1 or is_buffer else torch.lerp(found[name], tensor, 1 - DECAY)
    return found


def held_out_loss(folder: Path, state: dict[str, Tensor]) -> float:
    model = normed()
    model.load_state_dict(state)
    data = folder.parents[1] / "data.h5"
    loader = mpidp.HDF5Loader(
        data, ("x", "y"), 11, 0, split=("validation", 0.2), shuffle="none", world=mpidp.World.alone()
    )
    (batch,) = loader
    with torch.no_grad():
        return float(F.cross_entropy(model.eval()(batch.x), batch.y))


@pytest.mark.sizes
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("sync", [False, True])
def test_averages_are_evaluated_saved_and_resumed(
    world: mpidp.World, mpi_tmp_path: Path, sharded: bool, sync: bool
) -> None:
    """Behaviours 17, 21 and 43."""
    changes: dict[str, Any] = {
        "model__name": f"{__name__}:normed",
        "model__arguments": {},
        "data__global_batch": 12,  # no step of one sample a rank
        "data__drop_last": True,
        "train__ema_decay": DECAY,
        "train__sync_batch_norm": sync,
        "optimizer__sharded": sharded,
    }
    folder = assert_resumed_alike(world, mpi_tmp_path, 4, **changes)
    state = state_of(folder, 6)
    saved = state["others"]["ema"]
    expected = averages(folder, 6)
    assert saved["steps"] == 6
    assert saved["model"].keys() == expected.keys() == state["model"].keys()
    assert all(torch.equal(saved["model"][name], tensor) for name, tensor in expected.items())
    assert not torch.equal(expected["0.weight"], state["model"]["0.weight"])
    assert records(folder, "validation")[1]["loss"] == pytest.approx(held_out_loss(folder, expected), rel=1e-5)
    assert records(folder, "validation")[1]["loss"] != pytest.approx(held_out_loss(folder, state["model"]), rel=1e-5)


@pytest.mark.sizes
@pytest.mark.parametrize("sharded", [False, True])
def test_warmup_and_cosine(world: mpidp.World, mpi_tmp_path: Path, sharded: bool) -> None:
    """Behaviour 43: ten steps, of which three warm up."""
    folder = assert_resumed_alike(
        world,
        mpi_tmp_path,
        6,
        scheduler__name="warmup_cosine",
        scheduler__arguments={"warmup_steps": 3, "min_lr": 0.001},
        optimizer__sharded=sharded,
    )
    # The record of a step has the learning rate of the next one.
    cosine = [0.001 + 0.009 * (1 + math.cos(math.pi * step / 7)) / 2 for step in range(8)]
    expected = [0.01 * 2 / 3, 0.01, *cosine]
    assert [line["lr"] for line in records(folder, "train")] == pytest.approx(expected)


def test_averages_leave_out_steps_that_overflow(world: mpidp.World, mpi_tmp_path: Path) -> None:
    folder = run(
        world,
        mpi_tmp_path,
        train__precision="fp16",
        train__ema_decay=DECAY,
        train__epochs=1,
        loss__name="test_precision:spiked",
    )
    assert [state_of(folder, step)["others"]["ema"]["steps"] for step in range(1, 6)] == [1, 2, 3, 3, 4]
