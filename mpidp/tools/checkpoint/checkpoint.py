"""A run folder enters, its checkpoints and whether they are whole leave, as text. Needs neither MPI nor torch."""

from pathlib import Path

from mpidp.errors import CheckpointError
from mpidp.printable import listed
from mpidp.tools.table import size_text, table
from mpidp.train.checkpoints import manifest as manifests
from mpidp.train.checkpoints.checkpoint import is_checkpoint, newest, newest_first
from mpidp.train.checkpoints.publish import ASIDE, LATEST, PARTIAL


def list_checkpoints(place: Path) -> str:
    """A table of the checkpoints, newest first, without reading their content.

    Raises:
        CheckpointError: there are none.
    """
    paths = find(place)
    rows = [_row(path) for path in paths]
    lines = [f"{paths[0].parent}: {len(paths)} checkpoint{'' if len(paths) == 1 else 's'}"]
    lines.append(table(("name", "saved", "ranks", "files", "size", "state"), rows))
    lines += [f"{path.name} was not finished" for path in sorted(paths[0].parent.glob(f"{PARTIAL}*"))]
    aside = sorted(paths[0].parent.glob(f"step_*{ASIDE}*"))
    lines += [f"{path.name} was passed over and kept; remove it when nobody wants it" for path in aside]
    return "\n".join(lines)


def verify(place: Path) -> tuple[str, bool]:
    """A line for each checkpoint, and for each damaged file; and whether all are whole.

    Raises:
        CheckpointError: there are none.
    """
    lines, whole = [], True
    for path in find(place):
        faults = _faults(path)
        whole &= not faults
        lines.append(f"{path}: {'damaged' if faults else 'whole'}")
        lines += [f"  {fault}" for fault in faults]
    return "\n".join(lines), whole


def find(place: Path) -> list[Path]:
    """The checkpoints that are meant by a run folder, a checkpoints folder or a checkpoint.

    Raises:
        CheckpointError: there are none.
    """
    if place.name == LATEST or place.is_symlink():
        place = place.resolve()
    if is_checkpoint(place) or (place / manifests.NAME).is_file():  # a copy, too, if it is asked for by its name
        return [place]
    for folder in (place / "checkpoints", place):
        found = newest_first(folder)
        if found:
            return found
    what = "there is no such folder" if not place.exists() else "it holds no step_* folder"
    raise CheckpointError(f"no checkpoint in {place}: {what}. Give the folder of a run, for example runs/digits.")


def newest_whole(place: Path) -> tuple[Path, list[str]]:
    """The newest whole checkpoint that is meant, all its content checked; and why newer ones were passed over.

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
        return list(manifests.find_faults(path, manifests.read(path)))
    except CheckpointError as error:
        return [str(error)]


def _row(path: Path) -> tuple[object, ...]:
    try:
        manifest = manifests.read(path)
    except CheckpointError as error:
        return path.name, "?", "?", "?", "?", str(error)
    wrong = [
        file.name
        for file in manifest.files
        if not (path / file.name).is_file() or (path / file.name).stat().st_size != file.num_bytes
    ]
    state = f"{wrong[0]} is missing or has another size" if wrong else "sizes fit"
    return path.name, manifest.saved_at, manifest.ranks, len(manifest.files), size_text(manifest.num_bytes), state
