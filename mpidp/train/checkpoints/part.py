"""States in, files of a checkpoint out, hashed on their way and flushed to the disk. For a thread; no MPI."""

import hashlib
import os
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from mpidp.train.checkpoints.manifest import ALGORITHM, File
from mpidp.train.disk import as_checkpoint_error
from mpidp.world.record_file import flush_folder
from mpidp.world.status import status


def write_parts(folder: Path, parts: dict[str, dict[str, Any]]) -> tuple[File, ...]:
    """Writes one rank's files, by name, into a folder that some rank makes.

    Raises:
        CheckpointError: the file system refuses; says what and why.
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
    """Writes a state so that `torch.load(path, weights_only=True)` reads it; describes what was meant to be there.

    The checksum is of the bytes given to the system, not of those read back: a disk that loses some is found out.

    Args:
        path: the file; must not exist.
        state: nested dicts, lists and tuples of tensors on the CPU, numbers and strings.

    Raises:
        OSError: the file system refuses.
    """
    with open(path, "xb") as file:
        hashed = _Hashed(file)
        try:
            torch.save(state, cast(BinaryIO, hashed))
        except RuntimeError:
            if hashed.error is not None:  # torch tells its own consequence of it
                raise hashed.error from None
            raise
        file.flush()
        os.fsync(file.fileno())
    return File(path.name, hashed.num_bytes, hashed.hash.hexdigest())


class _Hashed:
    """What torch writes to: the file, by way of the hash."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self.hash = hashlib.new(ALGORITHM)
        self.num_bytes = 0
        self.error: OSError | None = None

    def write(self, data: memoryview) -> int:
        """Takes all of it."""
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.hash.update(data)
        self.num_bytes += data.nbytes if isinstance(data, memoryview) else len(data)
        return len(data)

    def flush(self) -> None:
        """Part of what torch expects of a file."""
        self._file.flush()
