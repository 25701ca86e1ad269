"""A folder to train in: a run file, a model that can be slowed down, and the job scripts, filled in."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TRAINING_ROWS, STEPS = 1438, 12  # of an epoch; a step has 128 samples, the last one fewer
MODULE = '''
"""A user's own model. It waits PAUSE_S seconds in every training step, once it has made two."""

import os
import time

import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layers = torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
        self.layers = torch.nn.Sequential(*layers)
        self.step = 0

    def forward(self, x):
        if self.training:
            self.step += 1
            if self.step > 2:
                time.sleep(float(os.environ.get("PAUSE_S", "0")))
        return self.layers(x)
'''
# What the lines marked SITE become here.
SITE = {
    "--ntasks-per-node": "1",
    "--gpus-per-node": "1",
    "--cpus-per-task": "2",
    "--time": "00:05:00",
}


def make_workplace(folder: Path) -> Path:
    """Fill a folder with run.toml, own.py, data/, jobs/*.sbatch; returns it."""
    (folder / "data").mkdir()
    shutil.copy(ROOT / "data/digits.h5", folder / "data")
    (folder / "own.py").write_text(MODULE)
    (folder / "run.toml").write_text("""
        run = {name = "digits"}
        data = {train = "data/digits.h5", validation_fraction = 0.2, global_batch = 128}
        model = {name = "own:Net"}
        train = {epochs = 2}
        reduce = {reducer = "flat"}
        log = {every_steps = 4, progress_s = 0.1}
        """)
    (folder / "jobs").mkdir()
    for script in (ROOT / "jobs").glob("*.sbatch"):
        (folder / "jobs" / script.name).write_text(fill_in(script.read_text()))
    return folder


def fill_in(text: str, **more: str) -> str:
    """A template with its site lines changed for the test cluster."""
    for option, value in (SITE | more).items():
        text = re.sub(rf"^(#SBATCH {option})=\S+", rf"\1={value}", text, flags=re.MULTILINE)
    return text


def records(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    """Lines of a run's metrics."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def check_complete(run: Path, epochs: int = 2, rows: int = TRAINING_ROWS, steps: int = STEPS) -> None:
    """Assert that a run has all its epochs in its metrics: no step is missing, none is there twice."""
    trained = records(run)
    numbers = [record["step"] for record in trained]
    assert numbers == sorted(set(numbers)) and numbers[-1] == steps * epochs
    assert sum(record["samples"] for record in trained) == rows * epochs
    assert [record["step"] for record in records(run, "validation")] == [steps * (epoch + 1) for epoch in range(epochs)]


def starts(run: Path) -> list[dict[str, Any]]:
    """The starts of a run, oldest first."""
    found: list[dict[str, Any]] = json.loads((run / "env.json").read_text())
    return found
