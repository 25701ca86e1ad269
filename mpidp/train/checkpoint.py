"""A state in, a checkpoint folder out that is either complete or not there; and back, checked.

`checkpoints/step_00000120/` holds `state.pt` (what `torch.load(weights_only=True)` reads) and `manifest.json` with the
size and SHA-256 of each file (what `sha256sum` prints). It is written under another name, flushed to the disk and
renamed, so that a crash at any point leaves the older ones intact.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch

from mpidp.errors import CheckpointError

FORMAT = 1
STATE, MANIFEST = "state.pt", "manifest.json"
_PARTIAL = ".partial-"


def save(folder: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Writes one checkpoint and removes all but the newest `keep`, and those of later steps. One rank calls it.

    Args:
        folder: the run's `checkpoints` folder.
        step: optimizer steps done; names the checkpoint.
        state: nested dicts and lists of tensors, numbers and strings.
        keep: how many to keep; at least 1.
    """
    final = folder / f"step_{step:08d}"
    partial = folder / f"{_PARTIAL}{final.name}"
    shutil.rmtree(partial, ignore_errors=True)  # left by a crash
    partial.mkdir()
    with open(partial / STATE, "wb") as file:
        torch.save(state, file)
        _flush(file.fileno())
    manifest = {"format": FORMAT, "step": step, "files": {STATE: describe_file(partial / STATE)}}
    with open(partial / MANIFEST, "w") as file_text:
        file_text.write(json.dumps(manifest, indent=2) + "\n")
        file_text.flush()
        _flush(file_text.fileno())
    _flush_folder(partial)
    if final.exists():  # an earlier attempt at the same step, before a resume from an older one
        shutil.rmtree(final)
    partial.rename(final)
    _flush_folder(folder)
    others = [path for path in _newest_first(folder) if path != final]
    # One of a later step was passed over as unusable when the run was resumed before it: it must not count as kept.
    newer = [path for path in others if _by_step(path) > _by_step(final)]
    older = others[len(newer) :]
    for path in [*newer, *older[keep - 1 :]]:
        shutil.rmtree(path)
    return final


def newest(folder: Path) -> tuple[Path, list[str]]:
    """The newest checkpoint whose files match their manifest, and a line for each newer one that was passed over.

    Raises:
        CheckpointError: none is usable; says why for each.
    """
    passed_over: list[str] = []
    for path in _newest_first(folder):
        fault = find_fault(path)
        if fault is None:
            return path, passed_over
        passed_over.append(f"{path.name}: {fault}")
    if passed_over:
        raise CheckpointError(f"no usable checkpoint in {folder}: " + "; ".join(passed_over))
    raise CheckpointError(f"no checkpoint in {folder}: the run ended before its first one. Start it anew.")


def find_fault(path: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    if not isinstance(manifest, dict) or "format" not in manifest:
        return f"{MANIFEST} is damaged (it does not say its format)"
    if manifest["format"] != FORMAT:
        return f"format {manifest['format']!r}; this version of mpidp reads {FORMAT}"
    files = manifest.get("files")
    if not isinstance(files, dict) or STATE not in files:
        return f"{MANIFEST} is damaged (it does not list {STATE})"
    faults = (_find_file_fault(path / name, expected) for name, expected in files.items())
    return next((fault for fault in faults if fault is not None), None)


def _find_file_fault(file: Path, expected: Any) -> str | None:
    if not file.is_file():
        return f"{file.name} is missing"
    if not isinstance(expected, dict) or expected.keys() != {"bytes", "sha256"}:
        return f"{MANIFEST} is damaged (it does not describe {file.name})"
    found_bytes = file.stat().st_size
    if found_bytes != expected["bytes"]:
        return f"{file.name} has {found_bytes} bytes instead of {expected['bytes']}"
    if describe_file(file) != expected:
        return f"{file.name} is damaged (SHA-256 differs from the manifest's)"
    return None


def load(path: Path) -> dict[str, Any]:
    """The state of a checkpoint, on the CPU. Every call checks the files first; not collective.

    Raises:
        CheckpointError: its files do not match their manifest.
    """
    fault = find_fault(path)
    if fault is not None:
        raise CheckpointError(f"checkpoint {path}: {fault}")
    return cast(dict[str, Any], torch.load(path / STATE, map_location="cpu", weights_only=True))


def check_model(expected: dict[str, Any], found: dict[str, Any], path: Path) -> None:
    """Raises CheckpointError, naming the first difference, when a checkpoint holds another model's state.

    Args:
        expected: state_dict of the model at hand.
        found: state_dict in the checkpoint.
        path: the checkpoint, for the message.
    """
    advice = "Resume with the model it was made with, or start a new run."
    for name in [*expected, *found]:
        if name not in found:
            raise CheckpointError(f"checkpoint {path} is of another model: it has no {name!r}. {advice}")
        if name not in expected:
            raise CheckpointError(f"checkpoint {path} is of another model: this one has no {name!r}. {advice}")
        if expected[name].shape != found[name].shape or expected[name].dtype != found[name].dtype:
            raise CheckpointError(
                f"checkpoint {path} is of another model: {name!r} is {_kind(found[name])} there and "
                f"{_kind(expected[name])} here. {advice}"
            )


def describe_file(path: Path) -> dict[str, int | str]:
    """Size and SHA-256 of a file."""
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _newest_first(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob("step_*"), key=_by_step, reverse=True)


def _by_step(path: Path) -> tuple[int, str]:
    """A key that sorts by step, also beyond the eight digits that names are padded to."""
    return len(path.name), path.name


def _kind(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def _flush(descriptor: int) -> None:
    os.fsync(descriptor)


def _flush_folder(path: Path) -> None:
    """Makes names in a folder durable: without it a rename may be lost with the power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
