"""The path of a file enters; its file system leaves, and whether it gives locks. Not collective."""

import errno
import fcntl
import os

from mpidp.tools.doctor.facts import DataFile
from mpidp.world.system import file_system


def data_file(path: str) -> DataFile:
    """Look at a file without reading it."""
    try:
        place, num_bytes = file_system(path), os.stat(path).st_size
        lock_error = _lock_error(path)
    except OSError as error:
        return DataFile(path, error.strerror or str(error))
    return DataFile(path, "", num_bytes, place.kind, place.is_network, place.free_bytes, lock_error)


def _lock_error(path: str) -> str:
    """Take the lock that HDF5 takes for reading, and give it back; what the file system said if it could not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return f"{errno.errorcode.get(error.errno or 0, 'errno')} {error.errno}: {error.strerror}"
    finally:
        os.close(descriptor)
    return ""
