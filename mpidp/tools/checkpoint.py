"""`mpidp checkpoint list | verify | export`: commands on the checkpoints of a run, without MPI."""

import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from mpidp.errors import CheckpointError, ConfigError
from mpidp.options import Arg
from mpidp.printable import listed
from mpidp.tools.table import size_text, table
from mpidp.train.checkpoint.read import (
    ASIDE,
    LATEST,
    MANIFEST,
    PARTIAL,
    STATE,
    find_faults,
    is_checkpoint,
    newest,
    newest_first,
    part_name,
    read,
    read_manifest,
)

if TYPE_CHECKING:
    from torch import Tensor


_Place = Annotated[Path, Arg("RUN_FOLDER", positional=True)]


@dataclass(frozen=True)
class ListOptions:
    """List the checkpoints of a run, newest first, with what a look at names and sizes tells of each."""

    place: _Place
    """Folder of a run, its checkpoints folder, or one checkpoint."""


@dataclass(frozen=True)
class VerifyOptions:
    """Read every file of a run's checkpoints and compare it with its checksum; exit code 1 names what is damaged."""

    place: _Place
    """Folder of a run, its checkpoints folder, or one checkpoint."""


@dataclass(frozen=True)
class ExportOptions:
    """Write the model of the newest whole checkpoint, or of the one that is given, as one file for other programs."""

    place: _Place
    """Folder of a run, its checkpoints folder, or one checkpoint."""
    output: Path | None = None
    """File to write, which must not exist; else model.pt or model.safetensors in the current folder."""
    format: Literal["torch", "safetensors"] = "torch"
    """torch: a state_dict that torch.load reads; safetensors: tensors only, needs the extra of that name."""
    optimizer: bool = False
    """Write the optimizer's state too."""


def list_checkpoints(options: ListOptions) -> str:
    """A table of the checkpoints, newest first, without reading their content.

    Raises:
        CheckpointError: there are none.
    """
    paths = find(options.place)
    rows = [_row(path) for path in paths]
    lines = [f"{paths[0].parent}: {len(paths)} checkpoint{'' if len(paths) == 1 else 's'}"]
    lines.append(table(("name", "saved", "ranks", "files", "size", "state"), rows))
    lines += [f"{path.name} was not finished" for path in sorted(paths[0].parent.glob(f"{PARTIAL}*"))]
    aside = sorted(paths[0].parent.glob(f"step_*{ASIDE}*"))
    lines += [f"{path.name} was renamed because a resume skipped it; remove it if it is not needed" for path in aside]
    return "\n".join(lines)


def verify(options: VerifyOptions) -> tuple[str, bool]:
    """A line for each checkpoint, and for each damaged file; and whether all are whole.

    Raises:
        CheckpointError: there are none.
    """
    lines, whole = [], True
    for path in find(options.place):
        faults = _faults(path)
        whole &= not faults
        lines.append(f"{path}: {'damaged' if faults else 'whole'}")
        lines += [f"  {fault}" for fault in faults]
    return "\n".join(lines), whole


def find(place: Path) -> list[Path]:
    """The checkpoints in a run folder or a checkpoints folder, or the given one.

    Raises:
        CheckpointError: there are none.
    """
    if place.name == LATEST or place.is_symlink():
        place = place.resolve()
    if is_checkpoint(place) or (place / MANIFEST).is_file():  # a copy, too, if it is asked for by its name
        return [place]
    for folder in (place / "checkpoints", place):
        found = newest_first(folder)
        if found:
            return found
    what = "there is no such folder" if not place.exists() else "it holds no step_* folder"
    raise CheckpointError(f"no checkpoint in {place}: {what}. Give the folder of a run, for example runs/digits.")


def newest_whole(place: Path) -> tuple[Path, list[str]]:
    """The newest complete checkpoint, with all its content checked; and why newer ones were skipped.

    Raises:
        CheckpointError: none is whole.
    """
    paths = find(place)
    if len(paths) > 1:
        return newest(paths[0].parent)
    faults = _faults(paths[0])
    if faults:
        raise CheckpointError(f"checkpoint {paths[0]} is damaged: {listed(faults, '; ')}")
    return paths[0], []


def _faults(path: Path) -> list[str]:
    try:
        return list(find_faults(path, read_manifest(path)))
    except CheckpointError as error:
        return [str(error)]


def _row(path: Path) -> tuple[object, ...]:
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return path.name, "?", "?", "?", "?", str(error)
    wrong = [
        file.name
        for file in manifest.files
        if not (path / file.name).is_file() or (path / file.name).stat().st_size != file.num_bytes
    ]
    state = f"{wrong[0]} is missing or has another size" if wrong else "sizes fit"
    return path.name, manifest.saved_at, manifest.ranks, len(manifest.files), size_text(manifest.num_bytes), state


_SUFFIX = {"torch": ".pt", "safetensors": ".safetensors"}


def export(options: ExportOptions) -> str:
    """Write the model of a checkpoint; return what was written, in words.

    As "torch" it is the model's state_dict, or {"model": ..., "optimizer": ...}. As "safetensors" it is tensors by
    name, behind "model." and "optimizer.state." where there are both, and what is no tensor as JSON in the metadata.

    Raises:
        CheckpointError: no whole checkpoint.
        ConfigError: the file exists or cannot be written; safetensors is not installed.
    """
    target = options.output or Path(f"model{_SUFFIX[options.format]}")
    if target.exists():
        raise ConfigError(f"--output={target} exists, and is not overwritten. Give another name.")
    if options.format == "safetensors" and importlib.util.find_spec("safetensors") is None:
        raise ConfigError("--format=safetensors needs a package: pip install safetensors")
    path, passed_over = newest_whole(options.place)
    state = read(path, STATE)
    chosen = {"model": state["model"], "optimizer": _optimizer(state, path)} if options.optimizer else state["model"]
    partial = target.with_name(f".{target.name}.partial")
    try:
        _write(partial, chosen, options, int(state["step"]))
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"--output={target} cannot be written: {error.strerror}. Give another place.") from error
    lines = [f"skipped a newer checkpoint: {line}" for line in passed_over]
    what = "model and optimizer" if options.optimizer else "model"
    return "\n".join([*lines, f"{target}: {what} of {path}, {size_text(target.stat().st_size)}"])


def _optimizer(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """The state of the plain optimizer; joined if each rank saved its share."""
    from mpidp.train.sharded_state import plain_state

    return plain_state(state["optimizer"], lambda rank: read(path, part_name(rank))["optimizer"])


def _write(path: Path, chosen: Any, options: ExportOptions, step: int) -> None:
    import torch

    path.unlink(missing_ok=True)  # left by a killed export; a link is removed, not its target
    with open(path, "xb") as file:
        if options.format == "torch":
            torch.save(chosen, file)
        else:
            file.write(_safetensors(chosen, options.optimizer, step))
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
