"""Class weights and ignored classes: the mean over the weights of all ranks, whatever their shares."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812  # the name every PyTorch program gives it
from training_runs import CLASSES, assert_resumed_alike, records, run, state_of

import mpidp
from mpidp.models.mlp import mlp

WEIGHT = [0.1, 5.0, 1.0]
ARGUMENTS: dict[str, dict[str, Any]] = {
    "weight": {"weight": WEIGHT},
    "ignored": {"ignore_index": 1},
    "both, smoothed": {"weight": WEIGHT, "ignore_index": 0, "label_smoothing": 0.1},
    "smoothed": {"label_smoothing": 0.1},
}


@pytest.mark.sizes
@pytest.mark.parametrize("micro_batch", [0, 1])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_steps_are_those_of_plain_torch(world: mpidp.World, mpi_tmp_path: Path, name: str, micro_batch: int) -> None:
    """Behaviours 7, 13 and 26: parameters, recorded losses and the evaluation."""
    folder = run(
        world,
        mpi_tmp_path,
        loss__arguments=ARGUMENTS[name],
        train__precision="float64",
        train__micro_batch=micro_batch,
        optimizer__name="SGD",
        optimizer__lr=0.1,
    )
    data, alone = mpi_tmp_path / "data.h5", mpidp.World.alone()
    loader = mpidp.HDF5Loader(data, ("x", "y"), 10, 0, split=("train", 0.2), world=alone)
    held_out = mpidp.HDF5Loader(data, ("x", "y"), 11, 0, split=("validation", 0.2), shuffle="none", world=alone)
    arguments = dict(ARGUMENTS[name])
    if "weight" in arguments:
        arguments["weight"] = torch.tensor(WEIGHT, dtype=torch.float64)
    torch.manual_seed(0)
    model = mlp(4, 8, CLASSES).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[Any] = []
    evaluations = []
    for _ in range(2):
        for batch in loader:
            loss = F.cross_entropy(model(batch.x.double()), batch.y, **arguments)
            if loss.isnan():  # all of the step's targets are ignored: it has no gradient
                losses.append(None)
                continue
            losses.append(pytest.approx(float(loss.detach()), rel=1e-12))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        (batch,) = held_out
        output = model(batch.x.double())
        counted = batch.y != arguments.get("ignore_index", -1)
        accuracy = float((output.argmax(1) == batch.y)[counted].double().mean())
        evaluations.append((float(F.cross_entropy(output.detach(), batch.y, **arguments)), accuracy))
    for key, tensor in state_of(folder, 10)["model"].items():
        torch.testing.assert_close(tensor, model.state_dict()[key], rtol=1e-12, atol=1e-14)
    assert [line["loss"] for line in records(folder, "train")] == losses
    found = [(line["loss"], line["accuracy"]) for line in records(folder, "validation")]
    assert found == [pytest.approx(expected, rel=1e-12) for expected in evaluations]


def test_a_resumed_run_ends_with_the_same_bits(world: mpidp.World, mpi_tmp_path: Path) -> None:
    """Behaviour 43, in fp16 and with shards."""
    assert_resumed_alike(
        world,
        mpi_tmp_path,
        6,
        loss__arguments=ARGUMENTS["both, smoothed"],
        train__precision="fp16",
        optimizer__sharded=True,
    )
