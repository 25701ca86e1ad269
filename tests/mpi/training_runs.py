"""Runs of `mpidp train` on the ranks of a test: a few steps with changed settings, and what they left."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

import mpidp
from mpidp.config import from_dict
from mpidp.train.checkpoint.read import load
from mpidp.train.trainer import train

ROWS, CLASSES = 53, 3  # 5 steps of 10 samples an epoch, the last of 2
Run = Callable[..., Path]


def run(world: mpidp.World, folder: Path, resume: Path | None = None, **changes: Any) -> Path:
    """Trains 2 epochs, changed by keywords such as train__epochs=3; returns the run folder. Collective."""
    data = folder / "data.h5"
    if world.rank == 0 and not data.exists():
        generator = np.random.default_rng(0)
        with h5py.File(data, "w") as file:
            file["x"] = generator.standard_normal((ROWS, 4)).astype(np.float32)
            file["y"] = generator.integers(0, CLASSES, ROWS)
    world.barrier()
    table: dict[str, dict[str, Any]] = {
        "run": {"folder": str(folder / "runs")},
        "data": {"train": str(data), "validation_fraction": 0.2, "global_batch": 10},
        "model": {"name": "mlp", "arguments": {"inputs": 4, "hidden": 8, "classes": CLASSES}},
        "optimizer": {"lr": 0.01},
        "train": {"epochs": 2, "threads": 1},
        "log": {"every_steps": 1, "progress_s": 60.0},
        "checkpoint": {"every_steps": 1, "keep": 99},
    }
    for key, value in changes.items():
        section, name = key.split("__")
        table.setdefault(section, {})[name] = value
    before = set((folder / "runs").glob("*"))
    world.barrier()
    train(from_dict(table), resume)
    world.barrier()
    return resume or next(iter(set((folder / "runs").glob("*")) - before))


def state_of(run_folder: Path, step: int) -> dict[str, Any]:
    """What all ranks saved in common after a step."""
    return load(run_folder / "checkpoints" / f"step_{step:08d}")


def records(run_folder: Path, kind: str) -> list[dict[str, Any]]:
    """The metrics of a kind, without times."""
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    measured = ("samples_per_s", "seconds", "memory_bytes")
    return [{key: line[key] for key in line if key not in measured} for line in lines if line["kind"] == kind]


def assert_resumed_alike(world: mpidp.World, folder: Path, step: int, **changes: Any) -> Path:
    """A run that is resumed from a step ends with the bits of one without a break; returns it. Collective."""
    whole = run(world, folder, **changes)
    last = max(int(path.name.removeprefix("step_")) for path in (whole / "checkpoints").glob("step_*"))
    expected, lines = state_of(whole, last), [records(whole, kind) for kind in ("train", "validation")]
    world.barrier()
    if world.rank == 0:
        for later in range(step + 1, last + 1):
            shutil.rmtree(whole / "checkpoints" / f"step_{later:08d}")
    run(world, folder, resume=whole, **changes)
    found = state_of(whole, last)
    assert [records(whole, kind) for kind in ("train", "validation")] == lines
    for key in ("model", "optimizer", "scheduler", "others", "step"):
        assert_same(found.get(key), expected.get(key), key)
    world.barrier()
    return whole


def assert_same(found: Any, expected: Any, place: str) -> None:
    """Nested values are equal, tensors bit for bit."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), place
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), place
        for key, value in expected.items():
            assert_same(found[key], value, f"{place}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), place
        for index, value in enumerate(expected):
            assert_same(found[index], value, f"{place}.{index}")
    else:
        assert found == expected, place
