"""Writing of checkpoints: a rank's part by a thread, and the publishing of the whole by one process.

Training waits for a copy of the state in host memory only. The first copy also allocates its memory, which takes longer
than the copy itself; the next ones use it again. Files are hashed while they are written, and flushed to the disk.

A complete checkpoint stays complete, whenever the process dies: the manifest is written last, a folder gets its name by
a rename, and older ones are removed only when the new one is on the disk.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import itertools
import logging
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from mpidp.errors import CheckpointError
from mpidp.train.checkpoint.read import (
    ALGORITHM,
    ASIDE,
    BEST,
    LATEST,
    MANIFEST,
    PARTIAL,
    REMOVED,
    File,
    Manifest,
    by_step,
    newest_first,
)
from mpidp.world.record_file import flush_file, flush_folder, write_text
from mpidp.world.status import status
from mpidp.world.system import SILENT_S, Process

_REASONS = {
    errno.ENOSPC: ("no space is left on its file system", "Make room, or keep fewer (checkpoint.keep)"),
    errno.EDQUOT: ("the disk quota is used up", "Make room or ask for more quota"),
    errno.EFBIG: ("the file is larger than its file system or the limit of this process allows", "See ulimit -f"),
    errno.EROFS: ("its file system is read-only", "Have it mounted for writing"),
    errno.ENOENT: ("the folder is gone", "Find out what removed it"),
    errno.ESTALE: ("the file server no longer knows it (stale file handle)", "Look at the file server"),
    errno.EIO: ("the disk or the file server failed (input/output error)", "Look at the file server"),
    errno.EACCES: ("permission denied", "Make it writable for you"),
    errno.EPERM: ("the operation is not permitted", "Make it writable for you"),
}


def as_checkpoint_error(error: Exception, path: Path) -> CheckpointError:
    """The error itself if it is one; else the reason why something at `path` could not be written, and what to do."""
    if isinstance(error, CheckpointError):
        return error
    if not isinstance(error, OSError):
        return CheckpointError(f"{path} cannot be written: {type(error).__name__}: {error}")
    reason, advice = _REASONS.get(error.errno or 0, (error.strerror or str(error), "Look at the file system"))
    name = errno.errorcode.get(error.errno or 0, "no number")
    place = path if error.filename is None else error.filename
    return CheckpointError(f"{place} cannot be written: {reason} ({name}{_room(path, error)}). {advice}.")


def _room(path: Path, error: OSError) -> str:
    """How full the file system is, for a message about that."""
    if error.errno != errno.ENOSPC:
        return ""
    existing = next((folder for folder in path.parents if folder.exists()), None)
    if existing is None:
        return ""
    status = os.statvfs(existing)
    free, whole = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    return f"; {free:,} of {whole:,} bytes and {status.f_favail:,} of {status.f_files:,} files are free"


_Place = tuple[str | int, ...]


class Snapshot:
    """Buffers for copies of a state. The next `take` overwrites what the last one returned."""

    def __init__(self) -> None:
        self._buffers: dict[_Place, Tensor] = {}
        self._used: dict[_Place, Tensor] = {}
        self._seen: dict[tuple[Any, ...], Tensor] = {}
        self._waits = False  # whether copies from a GPU may still be running

    def take(self, state: Any) -> Any:
        """Returns the same nested dicts, lists and tuples, with copies of all tensors, which may be on any device.

        Tensors that are one and the same memory, such as tied weights, stay so. Returns when the copy is complete.
        """
        self._used, self._seen, self._waits = {}, {}, False
        with torch.no_grad():
            result = self._copy(state, ())
        if self._waits:
            torch.cuda.synchronize()
        self._buffers, self._seen = self._used, {}
        return result

    def _copy(self, value: Any, place: _Place) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value.detach(), place)
        if type(value) in (list, tuple):
            return type(value)(self._copy(item, (*place, index)) for index, item in enumerate(value))
        if isinstance(value, dict):
            items = {key: self._copy(item, (*place, key)) for key, item in value.items()}
            if type(value) is dict:
                return items
            other = copy.copy(value)  # an OrderedDict with its metadata, as state_dict() makes
            other.update(items)
            return other
        return copy.deepcopy(value)

    def _copy_tensor(self, tensor: Tensor, place: _Place) -> Tensor:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor.cpu().clone()
        memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and memory in self._seen:
            return self._seen[memory]
        place = (tensor.device.type, *place)
        buffer, kind = self._buffers.get(place), (tensor.shape, tensor.dtype, tensor.stride())
        if buffer is None or (buffer.shape, buffer.dtype, buffer.stride()) != kind:
            buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        buffer.copy_(tensor, non_blocking=tensor.is_cuda)
        self._waits |= tensor.is_cuda
        self._used[place] = self._seen[memory] = buffer
        return buffer


def write_parts(folder: Path, parts: dict[str, dict[str, Any]]) -> tuple[File, ...]:
    """Writes one rank's files, by name, into a folder that some rank makes.

    Raises:
        CheckpointError: they cannot be written; the message says which and why.
    """
    path = folder
    try:
        with status.working("write a checkpoint"):
            folder.mkdir(exist_ok=True)
            files = []
            for name, state in parts.items():
                path = folder / name
                files.append(write_part(path, state))
            flush_folder(folder)
            flush_folder(folder.parent)
    except Exception as error:
        raise as_checkpoint_error(error, path) from error
    return tuple(files)


def write_part(path: Path, state: dict[str, Any]) -> File:
    """Writes a state for `torch.load(path, weights_only=True)`; returns the length and checksum of the file.

    The checksum is of the bytes given to the system, not of those read back: so it finds bytes that a disk lost.

    Raises:
        OSError: the file system refuses.
    """
    with open(path, "xb") as file:
        hashed = _Hashed(file)
        try:
            torch.save(state, cast(BinaryIO, hashed))
        except RuntimeError:
            if hashed.error is not None:  # torch raises another error after it
                raise hashed.error from None
            raise
        file.flush()
        os.fsync(file.fileno())
    return File(path.name, hashed.num_bytes, hashed.hash.hexdigest())


class _Hashed:
    """The file object for torch, which hashes what is written."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self.hash = hashlib.new(ALGORITHM)
        self.num_bytes = 0
        self.error: OSError | None = None

    def write(self, data: memoryview) -> int:
        """Hashes and writes all of it."""
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.hash.update(data)
        self.num_bytes += data.nbytes if isinstance(data, memoryview) else len(data)
        return len(data)

    def flush(self) -> None:
        """Does nothing; torch calls it."""
        self._file.flush()


OWNED_BY = "@"  # in the name of a partial folder, before the process that publishes it
_NEW_LINK = ".new_link"

log = logging.getLogger("mpidp.rank")


def complete(
    partial: Path,
    final: Path,
    manifest: Manifest,
    keep: int,
    relies_on: Sequence[Path] = (),
    is_best: bool = False,
) -> tuple[File, ...]:
    """Publishes a checkpoint and removes old ones; returns its files.

    Args:
        partial: the folder in which the ranks wrote, beside the final one.
        final: path of the checkpoint.
        manifest: of the files that the ranks wrote.
        keep: how many checkpoints to keep; at least 1.
        relies_on: other files that are flushed to the disk before it, if they exist.
        is_best: whether it is the one that stays as the best.

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
        if is_best:
            point_to(final, BEST)
        tidy(final, keep)
    except Exception as error:
        failed = as_checkpoint_error(error, final.parent)
        failed.add_note(f"{final.name} is complete; what failed is to point {LATEST!r} to it or to remove older ones.")
        raise failed from error
    return manifest.files


def publish(partial: Path, final: Path, manifest: Manifest) -> None:
    """Gives a complete checkpoint its name, with the arguments of `complete`; then it is on the disk.

    Raises:
        CheckpointError: a file that a rank wrote cannot be seen from here.
        OSError: the file system refuses.
    """
    _check_visible(partial, manifest)
    write_text(partial / MANIFEST, manifest.text())
    if final.is_dir():  # an earlier attempt at the same step, passed over by a resume from an older one
        set_aside(final)
    partial.rename(final)
    flush_folder(final.parent)


def tidy(final: Path, keep: int) -> None:
    """Points `latest` to a new checkpoint, sets aside those of later steps, and removes all but the newest `keep`.

    The one that the link `best` points to is not removed.

    Raises:
        OSError: the file system refuses.
    """
    point_to(final, LATEST)
    folder = final.parent
    others = [path for path in newest_first(folder) if path != final]
    # One of a later step was skipped when the run was resumed: it must not be taken for one of this run.
    newer = [path for path in others if by_step(path) > by_step(final)]
    for path in newer:
        set_aside(path)
    best = folder / BEST
    kept = os.readlink(best) if best.is_symlink() else ""
    for path in others[len(newer) :][keep - 1 :]:
        if path.name != kept:
            _remove(path)
    for left_by_a_crash in [*folder.glob(f"{PARTIAL}step_*"), *folder.glob(f"{REMOVED}step_*")]:
        if left_by_a_crash.is_dir() and not _is_in_use(left_by_a_crash):
            shutil.rmtree(left_by_a_crash)


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


def point_to(final: Path, name: str) -> None:
    """Makes a link beside a checkpoint, `latest` or `best`, point to it, at no moment to nothing."""
    new = final.parent / _NEW_LINK
    new.unlink(missing_ok=True)  # left by a crash
    new.symlink_to(final.name)
    link = final.parent / name
    if link.is_dir() and not link.is_symlink():  # the run folder was copied by something that follows links
        set_aside(link)
    new.replace(link)
    flush_folder(final.parent)


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
