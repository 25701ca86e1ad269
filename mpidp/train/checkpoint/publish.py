"""Publishing of a checkpoint: its name, the link `latest`, and the removal of old ones.

A complete checkpoint stays complete, whenever the process dies: the manifest is written last, a folder gets its name by
a rename, and older ones are removed only when the new one is on the disk. One process calls it; no torch.
"""

import itertools
import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from mpidp.errors import CheckpointError
from mpidp.train.checkpoint import manifest as manifests
from mpidp.train.checkpoint.disk import as_checkpoint_error
from mpidp.train.checkpoint.manifest import File, Manifest
from mpidp.train.checkpoint.read import by_step, newest_first
from mpidp.world.record_file import flush_file, flush_folder, write_text
from mpidp.world.status import status
from mpidp.world.system import SILENT_S, Process

PARTIAL, REMOVED, LATEST = ".partial-", ".removed-", "latest"
ASIDE = ".aside"  # suffix of folders that are set aside: no save counts or removes them
OWNED_BY = "@"  # in the name of a partial folder, before the process that publishes it
_NEW_LATEST = ".latest"

log = logging.getLogger("mpidp.rank")


def complete(
    partial: Path, final: Path, manifest: Manifest, keep: int, relies_on: Sequence[Path] = ()
) -> tuple[File, ...]:
    """Publishes a checkpoint and removes old ones; returns its files.

    Args:
        partial: the folder in which the ranks wrote, beside the final one.
        final: path of the checkpoint.
        manifest: of the files that the ranks wrote.
        keep: how many checkpoints to keep; at least 1.
        relies_on: other files that are flushed to the disk before it, if they exist.

    Raises:
        CheckpointError: a file cannot be written; the message says which, why, and whether the checkpoint is complete.
    """
    place = partial
    try:
        with status.working("publish a checkpoint"):
            for place in filter(Path.exists, relies_on):  # a file that was removed must not prevent a save
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
    write_text(partial / manifests.NAME, manifest.text())
    if final.is_dir():  # an earlier attempt at the same step, passed over by a resume from an older one
        set_aside(final)
    partial.rename(final)
    flush_folder(final.parent)


def tidy(final: Path, keep: int) -> None:
    """Points `latest` to a new checkpoint, sets aside those of later steps, and removes all but the newest `keep`.

    Args:
        final: the checkpoint that was just published.
        keep: how many to keep; at least 1.

    Raises:
        OSError: the file system refuses.
    """
    _point_to(final)
    _prune(final, keep)


def discard(partial: Path) -> None:
    """Removes what a failed save left; a failure to do so is only logged."""
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
        set_aside(latest)
    link.replace(latest)
    flush_folder(final.parent)


def _prune(final: Path, keep: int) -> None:
    folder = final.parent
    others = [path for path in newest_first(folder) if path != final]
    # One of a later step was skipped when the run was resumed: it must not be taken for one of this run.
    newer = [path for path in others if by_step(path) > by_step(final)]
    for path in newer:
        set_aside(path)
    for path in others[len(newer) :][keep - 1 :]:
        _remove(path)
    for left_by_a_crash in [*folder.glob(f"{PARTIAL}step_*"), *folder.glob(f"{REMOVED}step_*")]:
        if left_by_a_crash.is_dir() and not _is_in_use(left_by_a_crash):
            shutil.rmtree(left_by_a_crash)


def set_aside(path: Path) -> None:
    """Renames what is in the way to a name that is not read any more, and logs it."""
    names = (
        path.with_name(f"{path.name}{ASIDE}{'' if number == 1 else f'-{number}'}") for number in itertools.count(1)
    )
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    log.warning("%s is in the way of what this run saves; it is kept as %s", path, aside.name)


def _is_in_use(partial: Path) -> bool:
    """Whether the job that writes an unfinished checkpoint is alive, as far as this node can tell."""
    owner = Process.parse(partial.name.partition(OWNED_BY)[2])
    if owner is None or owner == Process.this():
        return False
    running = owner.is_running()
    return time.time() - partial.stat().st_mtime < SILENT_S if running is None else running


def _remove(path: Path) -> None:
    """Renames a checkpoint before it is removed: half of one must not be taken for a damaged one."""
    if path.is_symlink():  # a link by the user, who keeps it elsewhere
        path.unlink()
        return
    aside = path.with_name(f"{REMOVED}{path.name}")
    if aside.exists():
        shutil.rmtree(aside)
    path.rename(aside)
    shutil.rmtree(aside)
