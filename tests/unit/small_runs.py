"""Runs of a few steps in this process, with changed settings, and what they recorded."""

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import nn

from mpidp.config import RunConfig, from_dict
from mpidp.train.checkpoint.read import load, newest
from mpidp.train.trainer import train

ROWS, CLASSES = 53, 3


def small_net(kind: str = "plain", inputs: int = 4) -> nn.Module:
    middle = {"plain": nn.ReLU(), "dropout": nn.Dropout(0.5), "batch_norm": nn.BatchNorm1d(6)}[kind]
    return nn.Sequential(nn.Linear(inputs, 6), middle, nn.Linear(6, CLASSES))


def small_config(folder: Path, **changes: Any) -> RunConfig:
    """Settings for 2 epochs of 5 steps, changed by keywords such as train__epochs=3."""
    table: dict[str, dict[str, Any]] = {
        "run": {"folder": str(folder / "runs")},
        "data": {"train": str(_write_data(folder / "data.h5")), "validation_fraction": 0.2, "global_batch": 10},
        "model": {"name": f"{__name__}:small_net"},
        "optimizer": {"lr": 0.01},
        "train": {"epochs": 2, "threads": 1},
        "log": {"every_steps": 2},
    }
    for key, value in changes.items():
        section, name = key.split("__")
        table.setdefault(section, {})[name] = value
    return from_dict(table)


def small_run(folder: Path, resume: Path | None = None, **changes: Any) -> Path:
    """Train, or go on; returns the run folder."""
    before = set((folder / "runs").glob("*"))
    train(small_config(folder, **changes), resume)
    return resume or next(iter(set((folder / "runs").glob("*")) - before))


def records(run_folder: Path, kind: str = "") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if not kind or line["kind"] == kind]


def losses(run_folder: Path) -> list[tuple[str, int, float]]:
    return [(record["kind"], record["step"], record["loss"]) for record in records(run_folder)]


def weights(run_folder: Path) -> dict[str, torch.Tensor]:
    return load(newest(run_folder / "checkpoints")[0])["model"]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _write_data(path: Path) -> Path:
    if not path.exists():
        generator = np.random.default_rng(0)
        with h5py.File(path, "w") as file:
            file["x"] = generator.standard_normal((ROWS, 4)).astype(np.float32)
            file["y"] = generator.integers(0, CLASSES, ROWS)
    return path
