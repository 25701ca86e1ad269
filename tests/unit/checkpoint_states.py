"""States of checkpoints for tests: something to save for each step, and the check that it came back."""

from pathlib import Path
from typing import Any

import torch

from mpidp.train.checkpoint.read import ALGORITHM, PARTIAL, STATE, Manifest, folder_name, load, part_name, read
from mpidp.train.checkpoint.write import publish, tidy, write_parts


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"weight": torch.full((8,), float(step))}, "step": step, "text": "näme", "none": None}


def own_of(step: int, rank: int) -> dict[str, Any]:
    return {"rank": rank, "values": torch.full((5,), step + rank / 10)}


def save(folder: Path, step: int, state: dict[str, Any], keep: int, ranks: int = 2, token: str = "t") -> Path:
    """What the threads of so many ranks do, one after the other in this process."""
    partial, final = folder / f"{PARTIAL}{folder_name(step)}-{token}", folder / folder_name(step)
    files = []
    for rank in range(ranks):
        parts = {part_name(rank): own_of(step, rank)} | ({STATE: state} if rank == 0 else {})
        files += write_parts(partial, parts)
    publish(partial, final, Manifest(step, ranks, "2026-01-31T12:00:00+0000", ALGORITHM, tuple(files)))
    tidy(final, keep)
    return final


def check_state(path: Path, step: int, ranks: int = 2) -> None:
    state = load(path)
    assert state["step"] == step
    assert torch.equal(state["model"]["weight"], torch.full((8,), float(step)))
    for rank in range(ranks):
        own = read(path, part_name(rank))
        assert own["rank"] == rank and torch.equal(own["values"], own_of(step, rank)["values"])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
