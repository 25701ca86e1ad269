"""The state of a training as one thing: taken and loaded in memory, and that of another training refused by name."""

import copy
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import nn

import mpidp
from mpidp.errors import CheckpointError
from mpidp.train.state import TrainState


class Counter:
    """Something else that a training keeps."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"] = np.random.default_rng(0).standard_normal((24, 3)).astype(np.float32)
    return tmp_path / "data.h5"


def make_state(data: Path, net: nn.Module | None = None, **others: Any) -> TrainState:
    world = mpidp.init()
    torch.manual_seed(0)
    model = mpidp.DataParallel(net or nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)), world)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = mpidp.HDF5Loader(data, ("x",), global_batch=4, world=world)
    return TrainState(model, optimizer, loader, scheduler, others=others)


def take_steps(state: TrainState, count: int) -> list[float]:
    """Losses of some steps."""
    found: list[float] = []
    while len(found) < count:
        for batch in state.model.batches(state.loader):
            loss = state.model(batch.x).square().mean()
            batch.weigh(loss).backward()
            state.optimizer.step()
            state.optimizer.zero_grad()
            state.scheduler.step()
            state.step += 1
            found.append(loss.item())
            if len(found) == count:
                break
    return found


def test_a_state_loaded_elsewhere_goes_on_with_the_same_bits(data: Path) -> None:
    """Behaviour 43: in the middle of an epoch, with dropout, a schedule and something else to keep."""
    state = make_state(data, counter=Counter())
    take_steps(state, 8)
    state.others["counter"].count = 7  # type: ignore[attr-defined]
    saved = copy.deepcopy(state.state_dict())
    expected = take_steps(state, 7)
    other = make_state(data, counter=Counter())
    take_steps(other, 3)
    other.load_state_dict(saved)
    assert (other.step, other.epoch, other.others["counter"].state_dict()) == (8, 1, {"count": 7})
    assert take_steps(other, 7) == expected
    assert torch.equal(other.model.module[0].weight, state.model.module[0].weight)


def test_a_state_of_another_number_of_ranks_begins_random_streams_anew(data: Path) -> None:
    saved = copy.deepcopy(make_state(data).shared_state()) | {"ranks": 2, "step": 8}
    state = make_state(data)
    torch.manual_seed(5)
    drawn = []
    for _ in range(2):
        state.load_state_dict(saved)
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)
    with pytest.raises(CheckpointError, match="rank 0"):
        state.load_state_dict(saved | {"ranks": 1})


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (nn.Sequential(nn.Linear(3, 5)), ["0.weight", "(4, 3)", "(5, 3)"]),
        (nn.Sequential(nn.Linear(3, 4, bias=False)), ["'0.bias'"]),
        (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)), ["'1.weight'"]),
        (nn.Sequential(nn.Linear(3, 4)).double(), ["0.weight", "float64", "float32"]),
    ],
    ids=["shape", "one more", "one less", "dtype"],
)
def test_another_model_is_refused_naming_the_first_difference(data: Path, net: nn.Module, words: list[str]) -> None:
    saved = make_state(data).state_dict()
    with pytest.raises(CheckpointError) as caught:
        make_state(data, net).load_state_dict(saved, source="checkpoint c")
    assert all(word in str(caught.value) for word in ["checkpoint c", *words]), caught.value


@pytest.mark.parametrize(("part", "kind"), [("optimizer", "SGD"), ("scheduler", "none")])
def test_another_class_is_refused_before_anything_changes(data: Path, part: str, kind: str) -> None:
    state = make_state(data)
    saved = copy.deepcopy(state.state_dict())
    saved["classes"][part] = kind
    saved["model"]["0.bias"] += 1
    before = state.model.module[0].bias.clone()
    with pytest.raises(CheckpointError, match=f"{part} {kind}"):
        state.load_state_dict(saved)
    assert torch.equal(state.model.module[0].bias, before)


def test_another_set_of_other_things_is_refused(data: Path) -> None:
    saved = make_state(data, counter=Counter()).state_dict()
    with pytest.raises(CheckpointError, match="counter"):
        make_state(data).load_state_dict(saved)
