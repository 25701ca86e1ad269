"""Callbacks of a run file on several ranks: when they are called, and the failure of one."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from torch import nn

import mpidp
from mpidp.config import RunConfig, from_dict
from mpidp.errors import ConfigError
from mpidp.train.trainer import Trainer, train

pytestmark = pytest.mark.mpi

CALLS: list[tuple[Any, ...]] = []


class Net(nn.Linear):
    """A model without arguments."""

    def __init__(self) -> None:
        super().__init__(4, 3)


class Notes:
    """Notes every call."""

    def __init__(self, prefix: str = ""):
        self.prefix = prefix

    def on_start(self, trainer: Trainer) -> None:
        CALLS.append((f"{self.prefix}start", trainer.run.step))

    def on_step(self, trainer: Trainer, step: int, metrics: dict[str, Any]) -> None:
        CALLS.append((f"{self.prefix}step", step, metrics.get("step")))

    def on_epoch(self, trainer: Trainer, epoch: int, metrics: dict[str, Any]) -> None:
        CALLS.append((f"{self.prefix}epoch", epoch, metrics["loss"], metrics["validation_loss"]))

    def on_end(self, trainer: Trainer) -> None:
        CALLS.append((f"{self.prefix}end", trainer.run.step))


class Fails:
    """Fails on the last rank at a step."""

    def on_step(self, trainer: Trainer, step: int, metrics: dict[str, Any]) -> None:
        if step == 3 and trainer.world.rank == trainer.world.size - 1:
            raise OSError("the plotter is on fire")


class Unknown:
    """Has a method that nobody calls."""

    def on_epoch_end(self) -> None:
        """Keras has it."""


class Nothing:
    """Has no method."""


def config(world: mpidp.World, folder: Path, **callbacks: dict[str, Any]) -> RunConfig:
    if world.rank == 0:
        generator = np.random.default_rng(0)
        with h5py.File(folder / "data.h5", "w") as file:
            file["x"] = generator.standard_normal((50, 4)).astype(np.float32)
            file["y"] = generator.integers(0, 3, 50)
    world.barrier()
    return from_dict(
        {
            "run": {"folder": str(folder / "runs")},
            "data": {"train": str(folder / "data.h5"), "validation_fraction": 0.2, "global_batch": 20},
            "model": {"name": f"{__name__}:Net"},
            "train": {"epochs": 2, "threads": 1, "callbacks": callbacks},
            "log": {"every_steps": 2},
        }
    )


@pytest.mark.sizes
def test_when_they_are_called(world: mpidp.World, mpi_tmp_path: Path) -> None:
    """On all ranks with the same metrics, in the order of the run file."""
    CALLS.clear()
    first, second = {"name": f"{__name__}:Notes"}, {"name": f"{__name__}:Notes", "arguments": {"prefix": "second "}}
    train(config(world, mpi_tmp_path, first=first, second=second))
    mine = [call for call in CALLS if not call[0].startswith("second")]
    assert [call[:2] for call in mine] == [
        ("start", 0),
        ("step", 1),
        ("step", 2),
        ("epoch", 0),
        ("step", 3),
        ("step", 4),
        ("epoch", 1),
        ("end", 4),
    ]
    assert [call[2] for call in mine if call[0] == "step"] == [None, 2, 2, 4]
    assert [call[0] for call in CALLS[:2]] == ["start", "second start"] and len(CALLS) == 2 * len(mine)
    assert world.comm.allgather(CALLS) == [CALLS] * world.size


@pytest.mark.sizes
def test_a_failure_on_one_rank_is_one_on_all(world: mpidp.World, mpi_tmp_path: Path) -> None:
    with pytest.raises(OSError, match="the plotter is on fire") as caught:
        train(config(world, mpi_tmp_path, plot={"name": f"{__name__}:Fails"}))
    assert "in on_step of callback plot (Fails)" in " ".join(caught.value.__notes__)
    world.barrier()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Unknown", "method on_epoch_end, which is never called. Did you mean 'on_epoch'"),
        ("Nothing", "has none of the methods on_start"),
        ("Absent", "has no 'Absent'"),
    ],
)
def test_what_is_no_callback_is_refused_before_any_work(
    world: mpidp.World, mpi_tmp_path: Path, name: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        train(config(world, mpi_tmp_path, mine={"name": f"{__name__}:{name}"}))
    assert not (mpi_tmp_path / "runs").exists()
    world.barrier()
