"""Runs resumed in one process: nothing tells them from an uninterrupted one, and another training is refused."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import contents, losses, records, small_run, weights

from mpidp.config import OptimizerSection, RunConfig, to_toml
from mpidp.errors import CheckpointError
from mpidp.train.components import ignored_settings

Run = Callable[..., Path]


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return partial(small_run, tmp_path)


SCHEDULES: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [2, 4]},
    "CosineAnnealingLR": {"T_max": 10},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 11},
    "CyclicLR": {"base_lr": 0.001, "max_lr": 0.1, "cycle_momentum": False},
    "ExponentialLR": {"gamma": 0.9},
    "PolynomialLR": {"total_iters": 8},
    "CosineAnnealingWarmRestarts": {"T_0": 4},
}


def assert_resumed_alike(run: Run, whole: Path, settings: dict[str, Any], steps: tuple[int, ...]) -> None:
    """A run that is resumed from each of these steps ends as it did without a break."""
    expected, end = losses(whole), weights(whole)
    for step in steps:
        for path in (whole / "checkpoints").glob("step_*"):
            if int(path.name.removeprefix("step_")) > step:
                for file in path.iterdir():
                    file.unlink()
                path.rmdir()
        run(resume=whole, **settings)
        assert losses(whole) == expected, f"resumed at step {step}"
        assert all(torch.equal(weights(whole)[name], tensor) for name, tensor in end.items())


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_resumed_run_goes_on_with_its_schedule(run: Run, name: str) -> None:
    """Behaviour 43."""
    schedule = {"scheduler__name": name, "scheduler__arguments": SCHEDULES[name]}
    whole = run(**schedule)
    half = run(train__epochs=1, **schedule)
    run(resume=half, **schedule)
    keys = ("kind", "step", "epoch", "samples", "loss", "accuracy", "lr")
    assert [[record.get(key) for key in keys] for record in records(half)] == [
        [record.get(key) for key in keys] for record in records(whole)
    ]


@pytest.mark.parametrize(("kind", "optimizer"), [("plain", "AdamW"), ("dropout", "SGD"), ("batch_norm", "AdamW")])
def test_a_resumed_run_ends_with_the_same_bits(run: Run, kind: str, optimizer: str) -> None:
    """Behaviour 43: resumed at a step in the middle, and at the last step of an epoch."""
    arguments = {"momentum": 0.9} if optimizer == "SGD" else {}
    settings = {
        "model__arguments": {"kind": kind},
        "optimizer__name": optimizer,
        "optimizer__arguments": arguments,
        "checkpoint__every_steps": 1,
        "checkpoint__keep": 99,
        "train__epochs": 3,
    }
    whole = run(**settings)
    assert_resumed_alike(run, whole, settings, steps=(3, 5, 10, 13))


@pytest.mark.parametrize("shuffle", ["streams", "none"])
def test_a_resumed_run_leaves_out_the_same_steps(run: Run, shuffle: str) -> None:
    """Behaviours 23 and 43: 42 samples are 4 complete steps; resumed inside an epoch, at its end, and behind it."""
    settings = {
        "data__drop_last": True,
        "data__shuffle": shuffle,
        "checkpoint__every_steps": 1,
        "checkpoint__keep": 99,
        "log__every_steps": 1,
    }
    whole = run(**settings)
    assert [record["samples"] for record in records(whole, "train")] == [10] * 8
    assert [record["samples"] for record in records(whole, "validation")] == [11] * 2
    assert_resumed_alike(run, whole, settings, steps=(2, 4, 6))


def test_resuming_a_finished_run_does_nothing(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run()
    before = (folder / "metrics.jsonl").read_bytes()
    run(resume=folder)
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert "Nothing left to train" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer__name": "SGD"},
        {"optimizer__name": "Adam"},
        {"scheduler__name": "StepLR", "scheduler__arguments": {"step_size": 1}},
        {"model__arguments": {"kind": "batch_norm"}},
    ],
    ids=str,
)
def test_a_checkpoint_of_another_training_is_refused(run: Run, changes: dict[str, Any]) -> None:
    folder = run(train__epochs=1)
    before = contents(folder)
    with pytest.raises(CheckpointError, match="step_00000005"):
        run(resume=folder, **changes)
    assert contents(folder) == before, "nothing half-written"


def test_changed_settings_that_the_checkpoint_overrides_are_told() -> None:
    """A new learning rate does nothing on resume: the optimizer's state holds the old one."""
    saved = to_toml(RunConfig(optimizer=OptimizerSection(lr=0.1)))
    now = RunConfig(optimizer=OptimizerSection(lr=0.2, arguments={"weight_decay": 0.5}))
    assert ignored_settings(now, saved) == ["optimizer.arguments", "optimizer.lr"]
    assert ignored_settings(RunConfig(optimizer=OptimizerSection(lr=0.1)), saved) == []
