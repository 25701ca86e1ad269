"""Messages for failures of the file system: why a file cannot be written, and what to do. Needs no torch."""

import errno
import os
from pathlib import Path

from mpidp.errors import CheckpointError

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
