"""Reading of checkpoints: which ones a folder holds, whether they are complete, and what is in them.

A checkpoint is a folder `step_00000120`:

* `state.pt`: what all ranks share (model, optimizer, position in the data), written by rank 0;
* `rank_00003.pt`: what only rank 3 has (random streams, rounding errors not yet sent), written by rank 3;
* `manifest.json`: sizes and checksums of these, written last.

All are what `torch.load(weights_only=True)` reads. Only loading needs torch.

Nodes may see a file system in different states: a file that is whole on one may be stale or missing on another. So each
rank checks what it will load, and all files are checked by some rank.
"""

import pickle
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mpidp.errors import CheckpointError
from mpidp.printable import listed
from mpidp.train.checkpoint import manifest as manifests
from mpidp.train.checkpoint.manifest import Manifest

if TYPE_CHECKING:
    from mpidp.world.world import World


STATE = "state.pt"
_PREFIX = "step_"
# As `folder_name` writes it. Anything with another name, such as a copy, belongs to the user.
_NAME = re.compile(rf"{_PREFIX}([0-9]{{8}}|[1-9][0-9]{{8,}})")


def folder_name(step: int) -> str:
    """Name of the checkpoint of a step."""
    return f"{_PREFIX}{step:08d}"


def is_checkpoint(path: Path) -> bool:
    """Whether this is a folder with the name of a checkpoint, complete or not."""
    return _NAME.fullmatch(path.name) is not None and path.is_dir()


def part_name(rank: int) -> str:
    """Name of the file of one rank."""
    return f"rank_{rank:05d}.pt"


def by_step(path: Path) -> tuple[int, str]:
    """A key that sorts by step, also beyond the eight digits that names are padded to."""
    return len(path.name), path.name


def newest_first(folder: Path) -> list[Path]:
    """All checkpoints in a run's `checkpoints` folder, complete or not."""
    return sorted(filter(is_checkpoint, folder.glob(f"{_PREFIX}*")), key=by_step, reverse=True)


def newest(folder: Path) -> tuple[Path, list[str]]:
    """The newest checkpoint whose files match their manifest, and a line for each newer one that was passed over.

    Not collective: for what this process alone can read.

    Raises:
        CheckpointError: none is usable; the message has the reason for each.
    """
    passed_over: list[str] = []
    for path in newest_first(folder):
        fault = find_fault(path)
        if fault is None:
            return path, passed_over
        passed_over.append(f"{path.name}: {fault}")
    raise none_usable(folder, passed_over)


def none_usable(folder: Path, passed_over: list[str]) -> CheckpointError:
    """The error for a folder without a usable checkpoint; with a line for each that is not."""
    if passed_over:
        return CheckpointError(f"no usable checkpoint in {folder}: " + listed(passed_over, "; "))
    return CheckpointError(f"no checkpoint in {folder}: the run ended before its first one. Start it anew.")


def find_fault(path: Path, names: Iterable[str] | None = None) -> str | None:
    """What is wrong with a checkpoint's files, the first that is found, or None.

    Args:
        path: the checkpoint.
        names: files to check beside the manifest; None for all.
    """
    try:
        manifest = manifests.read(path)
    except CheckpointError as error:
        return str(error)
    known = {file.name for file in manifest.files}
    missing = [name for name in _expected(manifest) if name not in known]
    if missing:
        return f"{manifests.NAME} is damaged (it does not list {missing[0]})"
    return next(manifests.find_faults(path, manifest, names), None)


def load(path: Path) -> dict[str, Any]:
    """The state that all ranks share, on the CPU. Every call checks all files first. Not collective.

    Raises:
        CheckpointError: the files do not match their manifest.
    """
    fault = find_fault(path)
    if fault is not None:
        raise CheckpointError(f"checkpoint {path}: {fault}")
    return read(path, STATE)


def read(path: Path, name: str) -> dict[str, Any]:
    """The content of one file of a checkpoint that has been checked, on the CPU.

    Raises:
        CheckpointError: it cannot be read, or torch cannot load it.
    """
    import torch

    try:
        return cast(dict[str, Any], torch.load(path / name, map_location="cpu", weights_only=True))
    except pickle.UnpicklingError as error:  # torch's message advises to load it without this protection
        raise CheckpointError(
            f"checkpoint {path}: {name} holds something else than tensors, numbers and text, which could be a program; "
            f"it is not loaded"
        ) from error
    except Exception as error:  # torch raises exceptions of many classes
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise CheckpointError(f"checkpoint {path}: {name} cannot be loaded ({reason})") from error


def read_shard(path: Path, rank: int) -> list[Any]:
    """What a rank saved of an optimizer in shards (`mpidp.train.sharded.state`).

    Raises:
        CheckpointError: as `read` does.
    """
    shard: list[Any] = read(path, part_name(rank))["optimizer"]
    return shard


def _expected(manifest: Manifest) -> list[str]:
    return [STATE, *(part_name(rank) for rank in range(manifest.ranks))]


def newest_readable(world: "World", folder: Path) -> tuple[Path, list[str]]:
    """The newest checkpoint of which every rank can read its part, and a line for each newer one. Collective.

    Args:
        world: the ranks.
        folder: the run's `checkpoints` folder.

    Raises:
        CheckpointError: none is usable; the message has the reason and the rank for each.
    """
    with world.raise_on_all_ranks("looking for checkpoints"):
        mine = [path.name for path in newest_first(folder)]
    names = {name for of_rank in world.comm.allgather(mine) for name in of_rank}
    passed_over: list[str] = []
    for path in sorted((folder / name for name in names), key=by_step, reverse=True):
        fault = _find_fault_of_all(world, path)
        if fault is None:
            return path, passed_over
        passed_over.append(f"{path.name}: {fault}")
    with world.raise_on_all_ranks("looking for checkpoints"):
        raise none_usable(folder, passed_over)


def _find_fault_of_all(world: "World", path: Path) -> str | None:
    """The fault that the lowest rank found, the same on every rank, or None. Collective."""
    found: list[tuple[str | None, str, str]] = world.comm.allgather((*_examine(world, path), world.host))
    faults = [fault for fault, _, _ in found]
    wrong = [rank for rank, fault in enumerate(faults) if fault is not None]
    if wrong:
        where = "" if len(wrong) == world.size else f", seen by rank {wrong[0]} on {found[wrong[0]][2]}"
        return f"{faults[wrong[0]]}{where}"
    texts = [text for _, text, _ in found]
    other = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
    if other is not None:
        return f"{manifests.NAME} differs between rank 0 on {found[0][2]} and rank {other} on {found[other][2]}"
    return None


def _examine(world: "World", path: Path) -> tuple[str | None, str]:
    """What is wrong with this rank's files, or None; and the manifest's text."""
    if not path.is_dir():
        return "it is not there", ""
    try:
        manifest = manifests.read(path)
    except CheckpointError as error:
        return str(error), ""
    return find_fault(path, shares(world.rank, world.size, manifest.ranks)), manifest.text()


def shares(rank: int, size: int, saved_ranks: int) -> list[str]:
    """Names of the files that a rank checks: the common state, and its own, or its share of all where sizes differ."""
    return [STATE, *(part_name(part) for part in range(rank, saved_ranks, size))]
