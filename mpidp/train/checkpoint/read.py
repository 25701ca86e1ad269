"""Reading of checkpoints: which ones a folder holds, whether they are complete, and what is in them.

A checkpoint is a folder `step_00000120`:

* `state.pt`: what all ranks share (model, optimizer, position in the data), written by rank 0;
* `rank_00003.pt`: what only rank 3 has (random streams, rounding errors not yet sent), written by rank 3;
* `manifest.json`: sizes and checksums of these, written last. Each file's checksum is what `sha256sum` prints. The
  manifest's own is over its other lines, and any other spelling of the same content counts as damage, so that no byte
  of it can change unnoticed.

The others are what `torch.load(weights_only=True)` reads. Only loading needs torch.

Nodes may see a file system in different states: a file that is whole on one may be stale or missing on another. So each
rank checks what it will load, and all files are checked by some rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mpidp.errors import CheckpointError
from mpidp.printable import has_control, listed

if TYPE_CHECKING:
    from mpidp.world.world import World

_FORMAT = 2
# The fastest of hashlib's where the processor has instructions for it, as servers of the last years do.
ALGORITHM = "sha256"
# Some hundred bytes a rank: enough for a million ranks, and not too much to read of a damaged file.
_MOST_BYTES = 256 * 2**20


@dataclass(frozen=True)
class File:
    """One file of a checkpoint: its name, its length and its checksum in hexadecimal digits."""

    name: str
    num_bytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """What makes up a checkpoint.

    Attributes:
        step: optimizer steps done.
        ranks: how many ranks wrote it.
        saved_at: when, as in `2026-01-31T12:00:00+0000`.
        algorithm: what made the checksums; a name that hashlib knows.
        files: every file but the manifest itself.
    """

    step: int
    ranks: int
    saved_at: str
    algorithm: str
    files: tuple[File, ...]

    @property
    def num_bytes(self) -> int:
        """Length of all files."""
        return sum(file.num_bytes for file in self.files)

    def text(self) -> str:
        """The content of `manifest.json`."""
        content = {"format": _FORMAT, **asdict(self)}
        return _dump({**content, "checksum": hashlib.new(self.algorithm, _dump(content).encode()).hexdigest()})


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: it is missing, damaged, or of a format that this version does not read; names no folder.
    """
    try:
        if (num_bytes := (folder / MANIFEST).stat().st_size) > _MOST_BYTES:
            raise ValueError(f"it has {num_bytes:,} bytes")
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        content = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} cannot be read ({error})") from error
    if not isinstance(content, dict) or "format" not in content:
        raise CheckpointError(f"{MANIFEST} is damaged (it does not say its format)")
    if content["format"] != _FORMAT:
        raise CheckpointError(
            f"{MANIFEST} says format {content['format']!r}, this version of mpidp reads {_FORMAT} (or it is damaged)"
        )
    try:
        values = {key: value for key, value in content.items() if key not in ("format", "checksum")}
        manifest = Manifest(**{**values, "files": tuple(File(**file) for file in content["files"])})
        intact = manifest.text() == text
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{MANIFEST} is damaged ({type(error).__name__}: {error})") from error
    if not intact:
        raise CheckpointError(f"{MANIFEST} is damaged (its content differs from its checksum)")
    fault = _find_odd_value(manifest)
    if fault is not None:
        raise CheckpointError(f"{MANIFEST} is damaged ({fault})")
    return manifest


def _find_odd_value(manifest: Manifest) -> str | None:
    """What is wrong with a manifest whose checksum is right, as another program may have written it; or None."""
    for name in ("step", "ranks"):
        value = getattr(manifest, name)
        if type(value) is not int or not 0 <= value < 2**63:
            return f"{name} = {value!r}"
    if manifest.ranks > len(manifest.files):
        return f"{manifest.ranks} ranks, but {len(manifest.files)} files"
    if not isinstance(manifest.saved_at, str):
        return f"saved_at = {manifest.saved_at!r}"
    for file in manifest.files:
        if not isinstance(file.name, str) or Path(file.name).name != file.name or has_control(file.name):
            return f"{file.name!r} is no name of a file in its folder"
        if type(file.num_bytes) is not int or not isinstance(file.digest, str):
            return f"{file.name} has size {file.num_bytes!r} and checksum {file.digest!r}"
    return None


def find_faults(folder: Path, manifest: Manifest, names: Iterable[str] | None = None) -> Iterator[str]:
    """What is wrong with each damaged file, its name first; of the files `names`, or all."""
    wanted = None if names is None else set(names)
    for file in manifest.files:
        if wanted is None or file.name in wanted:
            fault = _file_fault(folder / file.name, file, manifest.algorithm)
            if fault is not None:
                yield f"{file.name} {fault}"


def digest_file(path: Path, algorithm: str = ALGORITHM) -> str:
    """Checksum of a file's content, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def _file_fault(path: Path, expected: File, algorithm: str) -> str | None:
    if not path.is_file():
        return "is missing"
    found_bytes = path.stat().st_size
    if found_bytes != expected.num_bytes:
        return f"has {found_bytes:,} bytes instead of {expected.num_bytes:,}"
    try:
        digest = digest_file(path, algorithm)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if digest == expected.digest else f"is damaged (its {algorithm} differs from the manifest's)"


def _dump(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


STATE, MANIFEST = "state.pt", "manifest.json"
# Beside the checkpoints of a folder: what is being written, what is being removed, and the link to the newest.
PARTIAL, REMOVED = ".partial-", ".removed-"
LATEST, BEST = "latest", "best"  # links to checkpoints
ASIDE = ".aside"  # suffix of folders that are set aside: no save counts or removes them
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


def best(folder: Path) -> Path:
    """The checkpoint that the link `best` of a folder of checkpoints points to.

    Raises:
        CheckpointError: there is none.
    """
    link = folder / BEST
    path = folder / os.readlink(link) if link.is_symlink() else link
    if path == link or not is_checkpoint(path):
        raise CheckpointError(
            f"no best checkpoint in {folder}: set checkpoint.best when you train, or take the last, or the path of one."
        )
    return path


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
    raise _none_usable(folder, passed_over)


def _none_usable(folder: Path, passed_over: list[str]) -> CheckpointError:
    if passed_over:
        return CheckpointError(f"no usable checkpoint in {folder}: " + listed(passed_over, "; "))
    return CheckpointError(f"no checkpoint in {folder}: the run ended before its first one. Start it anew.")


def find_fault(path: Path, names: Iterable[str] | None = None) -> str | None:
    """The first that is wrong with a checkpoint, or None; beside its manifest, the files `names` are read, or all."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return str(error)
    known = {file.name for file in manifest.files}
    for name in _files_of(0, 1, manifest.ranks):
        if name not in known:
            return f"{MANIFEST} is damaged (it does not list {name})"
    return next(find_faults(path, manifest, names), None)


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


def newest_readable(world: World, folder: Path) -> tuple[Path, list[str]]:
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
        raise _none_usable(folder, passed_over)


def check_readable(world: World, path: Path) -> None:
    """Raises CheckpointError on all ranks unless every rank can read its part of a checkpoint. Collective."""
    fault = _find_fault_of_all(world, path)
    with world.raise_on_all_ranks("looking at the checkpoint"):
        if fault is not None:
            raise CheckpointError(f"checkpoint {path}: {fault}")


def _find_fault_of_all(world: World, path: Path) -> str | None:
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
        return f"{MANIFEST} differs between rank 0 on {found[0][2]} and rank {other} on {found[other][2]}"
    return None


def _examine(world: World, path: Path) -> tuple[str | None, str]:
    """What is wrong with this rank's files, or None; and the manifest's text."""
    if not path.is_dir():
        return "it is not there", ""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return str(error), ""
    return find_fault(path, _files_of(world.rank, world.size, manifest.ranks)), manifest.text()


def _files_of(rank: int, size: int, saved_ranks: int) -> list[str]:
    """Names of the files that a rank checks: the common state, and its own, or its share of all where sizes differ."""
    return [STATE, *(part_name(part) for part in range(rank, saved_ranks, size))]
