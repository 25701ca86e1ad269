"""States of checkpoints for tests: a step comes in, something to save goes out; and the check that it came back."""

from pathlib import Path
from typing import Any

import torch

from mpidp.train.checkpoint import load


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"weight": torch.full((8,), float(step))}, "step": step, "text": "näme", "none": None}


def check_state(path: Path, step: int) -> None:
    state = load(path)
    assert state["step"] == step
    assert torch.equal(state["model"]["weight"], torch.full((8,), float(step)))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
