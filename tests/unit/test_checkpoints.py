"""`mpidp.Checkpoints` in one process: what it saves and when, how a loop goes on, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import mpidp
from mpidp.errors import CheckpointError, DataError
from mpidp.train import checkpoints
from mpidp.train.checkpoint.read import load
from mpidp.train.records.owner import Owner

ROWS, STEPS = 20, 5  # an epoch in batches of 4


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"] = np.random.default_rng(0).standard_normal((ROWS, 3)).astype(np.float32)
    return tmp_path / "data.h5"


class Training:
    """A loop of one's own; `rows` are those of each step."""

    def __init__(self, data: Path, folder: Path, shares: bool = False, **options: Any):
        torch.manual_seed(0)
        self.world = mpidp.init()
        self.model = mpidp.DataParallel(torch.nn.Linear(3, 1), self.world)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.loader: Any = mpidp.HDF5Loader(data, ("x",), global_batch=4, world=self.world)
        self.rows: list[list[int]] = []
        if shares:
            self.loader = mpidp.shares(ROWS, 4, world=self.world)
            self.torch_loader = DataLoader(TensorDataset(torch.arange(ROWS)), batch_sampler=self.loader)
        self.checkpoints = mpidp.Checkpoints(
            folder, mpidp.TrainState(self.model, self.optimizer, self.loader), **options
        )

    def batches(self) -> Any:
        if not hasattr(self, "torch_loader"):
            return self.loader
        return (share for share, _ in self.loader.steps(self.torch_loader))

    def run(self, epochs: int, stop_at: int = -1) -> bool:
        """Trains on; False where it broke off at a step, as if it had been killed."""
        for _ in range(self.checkpoints.epoch, epochs):
            for batch in self.batches():
                loss = self.model(torch.ones(4, 3) * sum(batch.indices.tolist())).square().mean()
                batch.weigh(loss).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.rows.append(sorted(batch.indices.tolist()))
                self.checkpoints.step()
                if self.checkpoints.state.step == stop_at:
                    self.checkpoints._saver.finish()
                    self.checkpoints.__exit__(RuntimeError, RuntimeError(), None)
                    return False
        self.checkpoints.close()
        return True


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in folder.glob("step_*[0-9]"))


@pytest.mark.parametrize("shares", [False, True], ids=["HDF5Loader", "shares"])
@pytest.mark.parametrize("step", [1, 3, STEPS, STEPS + 2])
def test_a_resumed_loop_takes_the_steps_that_are_left(data: Path, tmp_path: Path, shares: bool, step: int) -> None:
    """Behaviours 25 and 43: in the middle of an epoch, and behind its last step."""
    whole = Training(data, tmp_path / "whole", shares)
    whole.run(2)
    first = Training(data, tmp_path / "run", shares, every_steps=1)
    assert not first.checkpoints.resume()
    assert not first.run(2, stop_at=step)
    second = Training(data, tmp_path / "run", shares, every_steps=1)
    assert second.checkpoints.resume()
    assert second.checkpoints.state.step == step and second.checkpoints.epoch == step // STEPS
    second.run(2)
    assert first.rows + second.rows == whole.rows
    assert torch.equal(second.model.module.weight, whole.model.module.weight)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [5, 10, 15]),
        ({"keep": 2}, [10, 15]),
        ({"every_epochs": 2}, [10, 15]),
        ({"every_epochs": 0}, [15]),
        ({"every_steps": 4, "every_epochs": 0, "background": False}, [8, 12, 15]),
        ({"every_steps": 4, "keep": 9}, [4, 5, 8, 10, 12, 15]),
    ],
    ids=str,
)
def test_when_it_saves(data: Path, tmp_path: Path, options: dict[str, Any], expected: list[int]) -> None:
    """And in any case the last step, when it is closed."""
    Training(data, tmp_path / "run", **options).run(3)
    assert saved(tmp_path / "run") == expected
    assert not (tmp_path / "run/owner.json").exists()


def test_a_checkpoint_loads_in_plain_torch(data: Path, tmp_path: Path) -> None:
    """Behaviour 20."""
    training = Training(data, tmp_path / "run")
    training.run(1)
    state = load(tmp_path / "run/step_00000005")
    plain = torch.nn.Linear(3, 1)
    plain.load_state_dict(state["model"])
    assert torch.equal(plain.weight, training.model.module.weight)
    torch.optim.Adam(plain.parameters()).load_state_dict(state["optimizer"])


def test_a_damaged_one_is_passed_over(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Behaviours 41 and 42."""
    Training(data, tmp_path / "run").run(2)
    (tmp_path / "run/step_00000010/state.pt").write_bytes(b"")
    training = Training(data, tmp_path / "run")
    with caplog.at_level("INFO", "mpidp"):
        assert training.checkpoints.resume()
    assert training.checkpoints.state.step == 5
    assert "skipped a newer checkpoint: step_00000010: state.pt has 0 bytes" in caplog.text
    training.run(2)
    assert (tmp_path / "run/step_00000010.aside").is_dir()
    assert saved(tmp_path / "run") == [5, 10]


def test_without_a_usable_one_it_does_not_begin_anew(data: Path, tmp_path: Path) -> None:
    Training(data, tmp_path / "run").run(1)
    (tmp_path / "run/step_00000005/manifest.json").write_text("{}")
    with (
        pytest.raises(CheckpointError, match="no usable checkpoint"),
        Training(data, tmp_path / "run").checkpoints as it,
    ):
        it.resume()


def test_checkpoints_that_nobody_asked_for_are_left_alone(data: Path, tmp_path: Path) -> None:
    Training(data, tmp_path / "run").run(1)
    before = saved(tmp_path / "run")
    training = Training(data, tmp_path / "run", every_steps=1)
    with pytest.raises(CheckpointError, match=r"resume\(\)"), training.checkpoints:
        training.run(1)
    assert saved(tmp_path / "run") == before


def test_a_state_from_memory_goes_on_in_the_folder(data: Path, tmp_path: Path) -> None:
    """As one does that is made anew when ranks were lost."""
    first = Training(data, tmp_path / "run", every_steps=1, keep=9)
    first.run(1, stop_at=3)
    second = Training(data, tmp_path / "run", every_steps=1, keep=9)
    second.checkpoints.state.load_state_dict(first.checkpoints.state.state_dict())
    second.run(1)
    assert saved(tmp_path / "run") == [1, 2, 3, 4, 5]


def test_the_folder_of_a_rank_that_died_goes_to_the_next_one(data: Path, tmp_path: Path) -> None:
    """Rank 0 was on another node, where nobody here can see that it is dead; another job is refused."""
    folder = tmp_path / "run"
    folder.mkdir()
    owner = Owner(folder, {})
    owner.path.write_text(json.dumps(owner._facts | {"host": "another.node"}))
    with pytest.raises(CheckpointError, match="in use"):
        Training(data, folder)
    checkpoints._taken.add(folder)  # as on all ranks that had it together
    Training(data, folder).run(1)
    assert saved(folder) == [5] and not owner.path.exists() and folder not in checkpoints._taken


def test_other_data_are_refused_unless_accepted(data: Path, tmp_path: Path) -> None:
    """Behaviour 53."""
    Training(data, tmp_path / "run", every_steps=1).run(1, stop_at=3)
    with h5py.File(data, "r+") as file:
        file["x"][0] = 9.0
    with pytest.raises(DataError, match="data are not those"), Training(data, tmp_path / "run").checkpoints as it:
        it.resume()
    training = Training(data, tmp_path / "run")
    assert training.checkpoints.resume(accept_changed=True)
    assert (training.checkpoints.state.step, training.loader.position) == (3, 0)
    training.run(1)


def test_values_that_make_no_sense(data: Path, tmp_path: Path) -> None:
    for options in ({"every_steps": -1}, {"every_epochs": -1}, {"keep": 0}, {"on_failure": "ignore"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Training(data, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_made(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/run"):
        Training(data, tmp_path / "file/run")
