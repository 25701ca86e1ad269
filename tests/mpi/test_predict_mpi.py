"""`mpidp predict` on several ranks: every row once, in the order of the files, as one process computes it."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mpidp
from mpidp.config import from_dict
from mpidp.errors import DataError, MpidpError
from mpidp.tools.inference import DATASET
from mpidp.tools.predict import PredictOptions, predict
from mpidp.train.trainer import train

pytestmark = pytest.mark.mpi

ROWS, BATCH = 53, 10  # neither is a multiple of the other, or of 2, 3 or 4 ranks; the last step has 3 samples


class Net(nn.Sequential):
    """Its output holds the number of the row, and it can fail at one."""

    fails_at = -1

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.5), nn.Linear(7, 3))

    def forward(self, x: Tensor) -> Tensor:
        if self.fails_at in x[:, 0]:
            raise DataError(f"row {self.fails_at} is not for me")
        return torch.cat([x[:, :1], super().forward(x / 100)], 1) if not self.training else super().forward(x / 100)


@pytest.fixture
def folder(world: mpidp.World, mpi_tmp_path: Path) -> Path:
    """Two files of data, and a run that was trained on all ranks."""
    if world.rank == 0:
        generator = np.random.default_rng(0)
        for name, rows in (("a.h5", range(30)), ("b.h5", range(30, ROWS))):
            x = np.concatenate([np.array(rows)[:, None], generator.standard_normal((len(rows), 4))], 1)
            with h5py.File(mpi_tmp_path / name, "w") as file:
                file.create_dataset("x", data=x.astype(np.float32), chunks=(7, 5))
                file["y"] = generator.integers(0, 3, len(rows))
    world.barrier()
    files = [str(mpi_tmp_path / name) for name in ("a.h5", "b.h5")]
    train(
        from_dict(
            {
                "run": {"folder": str(mpi_tmp_path / "runs")},
                "data": {"train": files, "global_batch": BATCH, "drop_last": True},  # in training only
                "model": {"name": f"{Path(__file__).stem}:Net"},
                "train": {"epochs": 2, "threads": 1},
            }
        )
    )
    return mpi_tmp_path


def plain_loop(folder: Path) -> np.ndarray[Any, Any]:
    model = Net().eval()
    model.load_state_dict(torch.load(folder / "runs/run/checkpoints/latest/state.pt", weights_only=True)["model"])
    x = []
    for name in ("a.h5", "b.h5"):
        with h5py.File(folder / name) as file:
            x.append(file["x"][:])
    inputs = torch.from_numpy(np.concatenate(x))
    with torch.no_grad():
        return torch.cat([model(inputs[start : start + BATCH]) for start in range(0, ROWS, BATCH)]).numpy()


@pytest.mark.sizes
def test_every_row_once_in_order(world: mpidp.World, folder: Path) -> None:
    """To rounding: matrix products of other shapes are summed in another order. Row numbers are exact."""
    predict(PredictOptions(folder / "runs/run", output=folder / "out.h5"))
    with h5py.File(folder / "out.h5") as file:
        found = file[DATASET][:]
    expected = plain_loop(folder)
    assert found[:, 0].tolist() == list(range(ROWS))
    assert found.dtype == np.float32 and np.allclose(found, expected, rtol=1e-5, atol=1e-6)
    world.barrier()


@pytest.mark.sizes
def test_a_rank_that_fails_in_the_middle_fails_on_all_and_leaves_nothing(
    world: mpidp.World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Net, "fails_at", 33)
    with pytest.raises(MpidpError, match="row 33 is not for me"):
        predict(PredictOptions(folder / "runs/run", output=folder / "out.h5"))
    world.barrier()
    assert not list(folder.glob("*out.h5*"))
    world.barrier()


def test_one_error_on_all_ranks_before_any_work(world: mpidp.World, folder: Path) -> None:
    if world.rank == 0:
        (folder / "out.h5").touch()
    with pytest.raises(MpidpError, match="exists, and is not overwritten"):
        predict(PredictOptions(folder / "runs/run", output=folder / "out.h5"))
    with pytest.raises(MpidpError, match="no checkpoint in"):
        predict(PredictOptions(folder / "none", output=folder / "other.h5"))
    world.barrier()
