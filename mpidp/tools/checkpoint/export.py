"""A checkpoint enters, one file that other programs read leaves: torch's state_dict, or safetensors. Needs no MPI."""

import importlib.util
import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpidp.errors import ConfigError
from mpidp.tools.checkpoint.checkpoint import newest_whole
from mpidp.tools.table import size_text
from mpidp.train.checkpoints.checkpoint import STATE, read, read_shard

if TYPE_CHECKING:
    from torch import Tensor

_SUFFIX = {"torch": ".pt", "safetensors": ".safetensors"}


def export(place: Path, output: Path | None, kind: str, with_optimizer: bool) -> str:
    """Writes the model of a checkpoint; returns what was written, in words.

    Args:
        place: folder of a run, its checkpoints folder, or one checkpoint.
        output: the file, which must not exist; None for `model.pt` or `model.safetensors` in the current folder.
        kind: "torch": the model's state_dict, or {"model": ..., "optimizer": ...}; "safetensors": tensors by name,
            behind "model." and "optimizer.state." where there are both, and what is no tensor as JSON in the metadata.
        with_optimizer: the optimizer's state too.

    Raises:
        CheckpointError: no whole checkpoint.
        ConfigError: the file exists or cannot be written; safetensors is not installed.
    """
    target = output or Path(f"model{_SUFFIX[kind]}")
    if target.exists():
        raise ConfigError(f"--output={target} exists, and is not overwritten. Give another name.")
    if kind == "safetensors" and importlib.util.find_spec("safetensors") is None:
        raise ConfigError("--format=safetensors needs a package: pip install 'mpidp[safetensors]'")
    path, passed_over = newest_whole(place)
    state = read(path, STATE)
    chosen = {"model": state["model"], "optimizer": _optimizer(state, path)} if with_optimizer else state["model"]
    partial = target.with_name(f".{target.name}.partial")
    try:
        _write(partial, chosen, kind, with_optimizer, int(state["step"]))
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"--output={target} cannot be written: {error.strerror}. Give another place.") from error
    lines = [f"passed over a newer checkpoint: {line}" for line in passed_over]
    what = "model and optimizer" if with_optimizer else "model"
    return "\n".join([*lines, f"{target}: {what} of {path}, {size_text(target.stat().st_size)}"])


def _optimizer(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """The plain optimizer's state, put together where each rank saved its share."""
    from mpidp.train.sharded.state import plain_state

    return plain_state(state["optimizer"], partial(read_shard, path))


def _write(path: Path, chosen: Any, kind: str, with_optimizer: bool, step: int) -> None:
    import torch

    path.unlink(missing_ok=True)  # of a killed export; and never what somebody's link of that name leads to
    with open(path, "xb") as file:
        if kind == "torch":
            torch.save(chosen, file)
        else:
            file.write(_safetensors(chosen, with_optimizer, step))
        file.flush()
        os.fsync(file.fileno())


def _safetensors(chosen: dict[str, Any], with_optimizer: bool, step: int) -> bytes:
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    metadata = {"format": "pt", "step": str(step)}
    if with_optimizer:
        others: dict[str, Any] = {}
        _flatten(chosen["optimizer"], "optimizer", tensors, others)
        metadata["optimizer"] = json.dumps(others)
        tensors |= {f"model.{name}": tensor for name, tensor in chosen["model"].items()}
    else:
        tensors |= chosen
    # The format has no shared memory: tied weights are written under each of their names.
    return save({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, metadata)


def _flatten(value: Any, place: str, tensors: "dict[str, Tensor]", others: dict[str, Any]) -> None:
    """Sorts the leaves of nested dicts into tensors and others, by their path."""
    import torch

    if isinstance(value, torch.Tensor):
        tensors[place] = value
    elif isinstance(value, dict):
        for key, item in value.items():
            _flatten(item, f"{place}.{key}", tensors, others)
    elif isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor | dict) for item in value):
        for index, item in enumerate(value):
            _flatten(item, f"{place}.{index}", tensors, others)
    else:
        others[place] = value
