"""`mpidp train` with batch norm over all ranks: the same curve on any number of them, also when one fails or dies."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from shrink_job import has_ulfm, make_place, trained_once
from shrink_job import train as shrink_train

from jobs import Result, run_job
from mpidp.train.checkpoint.read import load, newest

pytestmark = pytest.mark.timeout(200)  # several jobs a test, each with a limit of its own
HOST = socket.gethostname()
MODULE = '''
"""A small convolutional net, and ways in which rank 1 fails."""

import os
import sys

import torch
from torch import nn

import mpidp
from mpidp.world.launch import current_world

calls = 0


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.ReLU(),
        nn.Flatten(), nn.Linear(16, 3),
    )


def plain():
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 3))


def on_end(model, config):
    """Alone on rank 0: layers that waited for the others would wait for ever."""
    model.train()(torch.zeros(2, 2, 6, 6, dtype=torch.float64))
    print("at the end:", *(type(layer).__name__ for layer in model))


def transform(fields):
    global calls
    calls += 1
    if current_world().rank == 1 and calls == 3:
        raise mpidp.errors.DataError("sample 17 is no picture")
    return fields


def own_loop(what, overlap):
    world = mpidp.init()
    model = mpidp.SyncBatchNorm.convert(net(), world)
    model = mpidp.DataParallel(model, world, reducer="flat", overlap=overlap)
    x = torch.randn(4, 2, 6, 6)
    if what == "micro batches" and world.rank == 1:
        with model.no_sync():
            model(x).sum().backward()
    loss = model(x).sum()
    if what == "no target" and world.rank == 1:
        model.fail(mpidp.errors.DataError("no target"))
    loss.backward()


if __name__ == "__main__":
    own_loop(sys.argv[1], sys.argv[2] == "overlap")
'''


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """40 images in steps of 13: the last step has one, so that two of three ranks have none."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 40)
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"] = labels[:, None, None, None] + 2 * generator.standard_normal((40, 2, 6, 6))
        file["y"] = labels
    with h5py.File(tmp_path / "held_out.h5", "w") as file:
        file["x"], file["y"] = generator.standard_normal((7, 2, 6, 6)), generator.integers(0, 3, 7)
    (tmp_path / "own.py").write_text(MODULE)
    (tmp_path / "run.toml").write_text("""
        data = {train = "data.h5", validation = "held_out.h5", global_batch = 13}
        model = {name = "own:net"}
        optimizer = {name = "SGD", lr = 0.05, arguments = {momentum = 0.9}}
        train = {epochs = 2, precision = "float64", on_end = "own:on_end"}
        log = {every_steps = 1}
        """)
    return tmp_path


def train(place: Path, ranks: int, *words: str) -> Result:
    return run_job(["-m", "mpidp", "train", "run.toml", *words], ranks, 60, cwd=place)


def losses(place: Path, ranks: int, *words: str) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """What a run records, and the model that it saves."""
    name = f"{ranks}{len(words)}"
    result = train(place, ranks, f"--run.name={name}", *words)
    assert result.code == 0, result.output
    assert "at the end: Conv2d BatchNorm2d ReLU Conv2d BatchNorm2d ReLU Flatten Linear" in result.stdout
    folder = place / "runs" / name
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [record["loss"] for record in records if record["kind"] in ("train", "validation")]
    return found, load(newest(folder / "checkpoints")[0])["model"]


def test_the_same_losses_on_any_number_of_ranks(place: Path) -> None:
    """Behaviours 8, 16 and 18: training and evaluation, ranks without samples included; and the same model is saved."""
    expected, model = losses(place, 1)
    assert len(expected) == 2 * (4 + 1)
    for ranks, overlap in ((2, "off"), (3, "on")):
        found, same = losses(place, ranks, "--train.sync_batch_norm=True", f"--reduce.overlap={overlap}")
        assert found == pytest.approx(expected, rel=1e-9)
        assert list(same) == list(model)
        for name, value in model.items():
            torch.testing.assert_close(same[name], value, rtol=1e-8, atol=1e-10)
    other, _ = losses(place, 3)
    assert other != pytest.approx(expected, rel=1e-3), "batch norm of each rank's own samples does as well here"


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_data_that_one_rank_cannot_have(place: Path, overlap: str) -> None:
    """Behaviours 18 and 30: nobody waits in a layer for it; all ranks end by its error, which is said once."""
    words = ("--train.sync_batch_norm=True", "--data.transform=own:transform", f"--reduce.overlap={overlap}")
    result = train(place, 3, *words)
    assert result.code == 1
    assert result.output.count("sample 17 is no picture") == 1
    assert f"on rank 1 of 3 ({HOST}), after step 2" in result.output
    assert "bort" not in result.output


@pytest.mark.parametrize("overlap", ["after", "overlap"])
def test_different_numbers_of_micro_batches(place: Path, overlap: str) -> None:
    """Behaviour 18: no endless wait, and a word about what is wrong."""
    result = run_job(["own.py", "micro batches", overlap], 3, 40, cwd=place)
    assert result.code == 1
    text = "ranks 0, 2 came to the reduction of gradients; rank 1 came to a forward pass"
    assert result.output.count(text) == 1, result.output


def test_a_failure_between_forward_and_backward(place: Path) -> None:
    """Behaviours 18 and 30: the others may be in any layer, so this rank ends the job."""
    result = run_job(["own.py", "no target", "after"], 3, 40, cwd=place)
    assert result.code == 1
    assert f"[rank 1 of 3 on {HOST}]" in result.output
    assert result.output.count("DataError: no target") == 1


def test_a_model_without_such_layers(place: Path) -> None:
    """Behaviour 18: what was asked for and is not there is said."""
    result = train(place, 2, "--train.sync_batch_norm=True", "--model.name=own:plain")
    assert result.code == 0, result.output
    assert "train.sync_batch_norm is true, but the model has no batch norm layer" in result.stderr


NORMAL = """

class Normal(Net):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(16)
        self.first = torch.nn.Sequential(self.first, self.norm)
"""


@pytest.mark.library
@pytest.mark.skipif(not has_ulfm(), reason="the launcher is not Open MPI's: no user-level failure mitigation")
@pytest.mark.parametrize("overlap", ["off", "on"])
def test_ranks_that_die(tmp_path: Path, overlap: str) -> None:
    """Behaviours 18 and 31: the layers go on with those that are left; the losses are those of a run without deaths."""
    place = make_place(tmp_path)
    with (place / "own.py").open("a") as file:
        file.write(NORMAL)
    words = ("--model.name=own:Normal", "--train.sync_batch_norm=True", f"--reduce.overlap={overlap}")
    untroubled = shrink_train(place, 2, words=words)
    assert untroubled.result.code == 0, untroubled.result.output
    trained = shrink_train(place, 4, "3:forward:2 0:backward:5 2:agree:9", words=words)
    assert trained.result.code == 0, trained.result.output
    assert trained.lost == [[3], [0], [2]]
    assert trained_once(trained)
    assert len(trained.losses) >= len(untroubled.losses) - 3
    for step, loss in trained.losses.items():
        assert loss == pytest.approx(untroubled.losses[step], rel=1e-4)
    for one, other in zip(trained.validations, untroubled.validations, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)  # running statistics saw each step once
