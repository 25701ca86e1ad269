"""A folder with all parts of a checkpoint in; the checkpoint under its name, `latest`, and no superfluous ones out.

Whatever moment the process dies at, what was complete before is complete afterwards: the manifest is written last, a
folder appears by a rename, and older ones go only when the new one is on the disk. One process calls it; no torch.
"""

import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from mpidp.errors import CheckpointError
from mpidp.train.checkpoints import manifest as manifests
from mpidp.train.checkpoints.checkpoint import by_step, newest_first
from mpidp.train.checkpoints.disk import as_checkpoint_error
from mpidp.train.checkpoints.manifest import File, Manifest
from mpidp.world.flush import flush_file, flush_folder
from mpidp.world.status import status

PARTIAL, REMOVED, LATEST = ".partial-", ".removed-", "latest"
_NEW_LATEST = ".latest"

log = logging.getLogger("mpidp.rank")


def complete(
    partial: Path, final: Path, manifest: Manifest, keep: int, relies_on: Sequence[Path] = ()
) -> tuple[File, ...]:
    """Publishes a checkpoint and tidies up; returns its files.

    Args:
        partial: the folder in which the ranks wrote, beside the final one.
        final: what the checkpoint is to be called.
        manifest: what the ranks wrote.
        keep: how many checkpoints to keep; at least 1.
        relies_on: files elsewhere that, where they exist, are on the disk before it.

    Raises:
        CheckpointError: the file system refuses; says what and why, and whether the checkpoint is complete.
    """
    place = partial
    try:
        with status.working("publish a checkpoint"):
            for place in filter(Path.exists, relies_on):  # what somebody has removed is no reason to save nothing
                flush_file(place)
                flush_folder(place.parent)
            place = partial
            publish(partial, final, manifest)
    except Exception as error:
        raise as_checkpoint_error(error, place) from error
    try:
        tidy(final, keep)
    except Exception as error:
        failed = as_checkpoint_error(error, final.parent)
        failed.add_note(f"{final.name} is complete; what failed is to point {LATEST!r} to it or to remove older ones.")
        raise failed from error
    return manifest.files


def publish(partial: Path, final: Path, manifest: Manifest) -> None:
    """Gives a complete checkpoint its name. When it returns, the checkpoint is on the disk.

    Args:
        partial: the folder in which the ranks wrote, beside the final one.
        final: what the checkpoint is to be called.
        manifest: what the ranks wrote.

    Raises:
        CheckpointError: a file that a rank wrote cannot be seen from here.
        OSError: the file system refuses.
    """
    _check_visible(partial, manifest)
    with open(partial / manifests.NAME, "w", encoding="utf-8") as file:
        file.write(manifest.text())
        file.flush()
        os.fsync(file.fileno())
    flush_folder(partial)
    if final.exists():  # an earlier attempt at the same step, passed over by a resume from an older one
        _remove(final)
    partial.rename(final)
    flush_folder(final.parent)


def tidy(final: Path, keep: int) -> None:
    """Points `latest` to a new checkpoint, and removes all but the newest `keep`, those of later steps, and remains.

    Args:
        final: the checkpoint that was just published.
        keep: how many to keep; at least 1.

    Raises:
        OSError: the file system refuses.
    """
    _point_to(final)
    _prune(final, keep)


def discard(partial: Path) -> None:
    """Removes what a failed save left; a file system that refuses that as well is only noted in the log."""
    try:
        if partial.exists():
            shutil.rmtree(partial)
    except OSError as error:
        log.warning("%s stays behind, for the next save to remove: %s", partial, error)


def _check_visible(partial: Path, manifest: Manifest) -> None:
    for file in manifest.files:
        path = partial / file.name
        found = path.stat().st_size if path.is_file() else None
        if found != file.num_bytes:
            what = "is not there" if found is None else f"has {found:,} bytes instead of {file.num_bytes:,}"
            raise CheckpointError(
                f"{path} {what}, seen from rank 0, though the rank that wrote it was told that all is well. Put "
                f"run.folder on a file system that all nodes share."
            )


def _point_to(final: Path) -> None:
    """Makes the link `latest` point to a checkpoint, at no moment to nothing."""
    link = final.parent / _NEW_LATEST
    link.unlink(missing_ok=True)  # left by a crash
    link.symlink_to(final.name)
    latest = final.parent / LATEST
    if latest.is_dir() and not latest.is_symlink():  # the run folder was copied by something that follows links
        shutil.rmtree(latest)
    link.replace(latest)
    flush_folder(final.parent)


def _prune(final: Path, keep: int) -> None:
    folder = final.parent
    others = [path for path in newest_first(folder) if path != final]
    # One of a later step was passed over as unusable when the run was resumed before it: it must not count as kept.
    newer = [path for path in others if by_step(path) > by_step(final)]
    older = others[len(newer) :]
    for path in [*newer, *older[keep - 1 :]]:
        _remove(path)
    for left_by_a_crash in [*folder.glob(f"{PARTIAL}*"), *folder.glob(f"{REMOVED}*")]:
        shutil.rmtree(left_by_a_crash)


def _remove(path: Path) -> None:
    """Takes a checkpoint out of the list at once, and then away: half of one must not be taken for a damaged one."""
    aside = path.with_name(f"{REMOVED}{path.name}")
    if aside.exists():
        shutil.rmtree(aside)
    path.rename(aside)
    shutil.rmtree(aside)
