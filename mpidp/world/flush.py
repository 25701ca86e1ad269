"""A file or a folder in; what is in it on the disk for certain out. Needs neither MPI nor torch.

Without it a file, its name or a new name may be lost with the power.
"""

import errno
import os
from pathlib import Path

# File systems that cannot flush a folder say so in one of these ways; names in it are then as durable as they get.
_NO_FOLDER_FLUSH = (errno.EINVAL, errno.ENOTSUP)


def flush_file(path: Path) -> None:
    """Makes what was written to a file durable, whoever wrote it; its name needs `flush_folder`.

    Raises:
        OSError: it is not there, or the disk failed.
    """
    try:
        descriptor = os.open(path, os.O_RDWR)  # some file servers flush nothing for who may only read
    except PermissionError:
        descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_folder(path: Path) -> None:
    """Makes the names in a folder durable.

    Raises:
        OSError: it is not there or may not be listed, or the disk failed.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_FLUSH:
            raise
    finally:
        os.close(descriptor)
