"""`manifest.json` of a checkpoint: sizes and checksums of its files, by which damage is found.

Each file's checksum is what `sha256sum` prints. The manifest's own is over its other lines, and any other spelling of
the same content counts as damage, so that no byte of it can change unnoticed. Needs no torch.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpidp.errors import CheckpointError
from mpidp.printable import has_control

FORMAT = 2
NAME = "manifest.json"
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
        content = {"format": FORMAT, **asdict(self)}
        return _dump({**content, "checksum": hashlib.new(self.algorithm, _dump(content).encode()).hexdigest()})


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: it is missing, damaged, or of a format that this version does not read; names no folder.
    """
    try:
        if (num_bytes := (folder / NAME).stat().st_size) > _MOST_BYTES:
            raise ValueError(f"it has {num_bytes:,} bytes")
        text = (folder / NAME).read_text(encoding="utf-8")
        content = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{NAME} cannot be read ({error})") from error
    if not isinstance(content, dict) or "format" not in content:
        raise CheckpointError(f"{NAME} is damaged (it does not say its format)")
    if content["format"] != FORMAT:
        raise CheckpointError(
            f"{NAME} says format {content['format']!r}, this version of mpidp reads {FORMAT} (or it is damaged)"
        )
    try:
        files = tuple(File(**file) for file in content["files"])
        manifest = Manifest(**{**_without(content, "format", "checksum"), "files": files})
        intact = manifest.text() == text
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{NAME} is damaged ({type(error).__name__}: {error})") from error
    if not intact:
        raise CheckpointError(f"{NAME} is damaged (its content differs from its checksum)")
    fault = _find_odd_value(manifest)
    if fault is not None:
        raise CheckpointError(f"{NAME} is damaged ({fault})")
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
    """What is wrong with each damaged file, its name first.

    Args:
        folder: the checkpoint.
        manifest: what it should hold.
        names: files to check; None for all.
    """
    wanted = None if names is None else set(names)
    for file in manifest.files:
        if wanted is None or file.name in wanted:
            fault = _find_fault(folder / file.name, file, manifest.algorithm)
            if fault is not None:
                yield f"{file.name} {fault}"


def digest_file(path: Path, algorithm: str = ALGORITHM) -> str:
    """Checksum of a file's content, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def _find_fault(path: Path, expected: File, algorithm: str) -> str | None:
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


def _without(content: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key not in keys}
