"""Fields that a model or a loss cannot take: one line in a run file's terms; and whose traceback is still shown."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from small_runs import ROWS, small_config, small_net, small_run
from torch import nn

import mpidp
from mpidp.errors import DataError, MpidpError
from mpidp.train.batch_norm import explain_batch_norm

Run = Callable[..., Path]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run whose file has some more fields."""
    generator = np.random.default_rng(0)
    path = small_config(tmp_path).data.train[0]
    with h5py.File(path, "a") as file:
        file["pixels"] = generator.integers(0, 256, (ROWS, 4), dtype=np.uint8)
        file["marks"] = generator.random(ROWS)
        file["group/kinds"] = generator.integers(0, 3, (ROWS, 1))
        file["seven"] = np.full(ROWS, 7)
    return partial(small_run, tmp_path)


class Own(nn.Linear):
    """A model of the user's own."""

    def __init__(self) -> None:
        super().__init__(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def halves(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output[:, 0]


def tokens() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(8, 3))


def swapped(fields: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"images": fields["x"].to(torch.uint8), "y": fields["y"]}


MODEL = f"{__name__}:"
CASES = {
    "bytes": (
        {"data__fields": ["pixels", "y"]},
        ["mat1 and mat2", 'field "pixels" (10, 4) uint8 from', "[data.field.pixels]", "float32", "scale = 0.0039"],
    ),
    "bytes, in float64": (
        {"data__fields": ["pixels", "y"], "train__precision": "float64"},
        ['[data.field.pixels] dtype = "float64"'],
    ),
    "no tokens": (
        {"model__name": f"{MODEL}tokens"},
        ["Long", 'field "x" (10, 4) float32', '[data.field.x] decode = "numpy:int64"'],
    ),
    "width": ({"model__arguments": {"inputs": 5}}, ['"x" (10, 4) float32', "10x4 and 5x6", "model.arguments"]),
    "fractions": ({"data__fields": ["x", "marks"]}, ["step 1", 'field "marks" (10,) float32', "[data.field.marks]"]),
    "labels in a column": (
        {"data__fields": ["x", "group/kinds"]},
        ['"group/kinds" (10, 1) int64 from 0 to 2', '[data.field."group/kinds"] decode = "numpy:ravel"'],
    ),
    "classes that the model has not": ({"data__fields": ["x", "seven"]}, ["Target 7 is out of bounds", "(10, 3)"]),
    "dtype of targets": (
        {"data__fields": ["x", "pixels"], "loss__name": "nll_loss"},
        ['field "pixels" (10, 4) uint8', "output (10, 3) float32", "nll_loss"],
    ),
    "broadcasting": ({"loss__name": "mse_loss"}, ["(10, 3)", '"y" (10,) int64', "mse_loss"]),
    "loss of one's own without a mean": ({"loss__name": f"{MODEL}halves"}, ["no scalar", "halves"]),
    "transform": (
        {"data__transform": f"{MODEL}swapped"},
        ['field "images" (10, 4) uint8', f"The transform {MODEL}swapped"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_line_names_field_shape_dtype_and_what_to_write(run: Run, name: str) -> None:
    changes, words = CASES[name]
    with pytest.raises(DataError) as caught:
        run(**changes)
    text = str(caught.value)
    assert all(word in text for word in words) and "\n" not in text, text
    assert caught.value.__context__ is None, "torch's traceback would be shown as well"


def test_what_only_evaluation_refuses(run: Run, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "held_out.h5", "w") as file:
        file["x"], file["y"] = np.ones((4, 5), "f4"), np.zeros(4, int)
    with pytest.raises(DataError, match=r'in the evaluation after step 6: field "x" \(4, 5\) float32'):
        run(data__validation=str(tmp_path / "held_out.h5"), data__validation_fraction=0.0, data__global_batch=9)


def test_a_model_of_ones_own_keeps_its_traceback(run: Run) -> None:
    """Only its author can tell whether it or its input is wrong: both are shown."""
    with pytest.raises(RuntimeError, match="mat1 and mat2 must have the same dtype") as caught:
        run(model__name=f"{MODEL}Own", data__fields=["pixels", "y"])
    assert "forward" in [entry.name for entry in caught.traceback if entry.path == Path(__file__)]
    (note,) = caught.value.__notes__
    assert 'field "pixels" (10, 4) uint8' in note and '[data.field.pixels] dtype = "float32"' in note


def test_errors_of_another_kind_are_left_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Own, "forward", lambda self, x: {}["no such layer"])
    with pytest.raises(KeyError) as caught:
        run(model__name=f"{MODEL}Own")
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_no_memory_left(run: Run, monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    def forward(self: Own, x: torch.Tensor) -> torch.Tensor:
        if phase == "forward":
            torch.empty(1 << 60, dtype=torch.uint8)
        output = nn.functional.linear(x, self.weight, self.bias)
        output.register_hook(lambda gradient: torch.empty(1 << 60, dtype=torch.uint8))
        return output

    monkeypatch.setattr(Own, "forward", forward)
    with pytest.raises((MpidpError, RuntimeError)) as caught:
        run(model__name=f"{MODEL}Own")
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert f"phase {phase}" in text and "fewer samples at once (train.micro_batch" in text, text
    assert isinstance(caught.value, MpidpError) == (phase == "forward")


@pytest.mark.parametrize("changes", [{"data__global_batch": 41}, {"train__micro_batch": 1}])
def test_batch_norm_over_one_sample(run: Run, changes: dict[str, int]) -> None:
    """42 samples: the second step has one, or every micro-batch."""
    words = r"1 sample to train on in step [12]: .*drop_last.*global_batch.*train\.sync_batch_norm"
    with pytest.raises(DataError, match=words):
        run(model__arguments={"kind": "batch_norm"}, **changes)


def _raised(module: nn.Module, values: torch.Tensor) -> Exception:
    with pytest.raises(Exception) as caught:
        module(values)
    return caught.value


def test_batch_norm_over_one_sample_in_a_loop_of_ones_own() -> None:
    world, model = mpidp.init(), small_net("batch_norm")
    error = explain_batch_norm(_raised(model, torch.ones(1, 4)), model, world)
    assert error is not None and f"rank 0 of 1 ({world.host}) has 1 sample" in str(error)


def test_what_else_layers_refuse_is_not_explained_by_batch_norm() -> None:
    world, model = mpidp.init(), small_net("batch_norm")
    assert explain_batch_norm(_raised(model, torch.ones(1, 5)), model, world) is None
    groups = nn.GroupNorm(4, 4)  # says the same words of one value a group, in a batch of any size
    assert explain_batch_norm(_raised(groups, torch.ones(1, 4)), groups, world) is None
