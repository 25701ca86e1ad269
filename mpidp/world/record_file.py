"""Atomic writing of small files, and flushes to the disk. Needs neither MPI nor torch."""

import errno
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from mpidp.errors import RecordError

# Errors of file systems that cannot flush a folder; nothing more can be done for the names in it.
_NO_FOLDER_FLUSH = (errno.EINVAL, errno.ENOTSUP)


def flush_file(path: Path) -> None:
    """Makes what was written to a file durable, whoever wrote it; its name needs `flush_folder`.

    Raises:
        OSError: it is not there, or the disk failed.
    """
    try:
        descriptor = os.open(path, os.O_RDWR)  # some file servers flush only for a writer
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


T = TypeVar("T", dict[str, Any], list[Any])


def write_text(path: Path, text: str) -> None:
    """Replaces a file, all at once; when it returns, the new text is on the disk. One process at a time.

    Raises:
        OSError: the file cannot be written; the former one stays, and the error names `path`.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        with open(new, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        flush_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_json(path: Path, content: dict[str, Any] | list[Any]) -> None:
    """Replaces a file by JSON, as `write_text` does."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def read_json(path: Path, kind: type[T]) -> T:
    """The content of a file, which is a `kind`: a dict or a list.

    Raises:
        FileNotFoundError: there is none.
        RecordError: it cannot be read, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{path} is damaged, or cannot be read ({error})") from error
    if not isinstance(content, kind):
        raise RecordError(f"{path} is damaged (it holds no JSON {'object' if kind is dict else 'list'})")
    return content
