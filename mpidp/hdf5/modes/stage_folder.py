"""Folders for staged copies on a node's disk, each kept as long as some process uses it.

A place is a folder of its own. Every process that uses places keeps a lock on a mark that names them, and the kernel
takes that lock away however the process ends. So a place that no locked mark names is a leftover, for instance of a
job that was killed.
"""

import fcntl
import hashlib
import json
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mpidp.errors import DataError, RecordError
from mpidp.world.record_file import read_json, write_json

_MARK, _PART, _RECORD = "user-", "part-", "record.json"


@dataclass(frozen=True)
class Source:
    """A file as it was when staging began. Another size or time of change makes another file of it."""

    path: str
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: str) -> "Source":
        """Return the facts of a file; raises `DataError` where it cannot be read."""
        try:
            facts = os.stat(path)
        except OSError as error:
            raise DataError(f"{path}: cannot be copied to the node: {error.strerror}") from error
        if not stat.S_ISREG(facts.st_mode):
            raise DataError(f"{path}: cannot be copied to the node: it is not a file")
        return cls(path, facts.st_size, facts.st_mtime_ns)


@dataclass(frozen=True)
class Place:
    """Where the copy of a source lies, or will lie."""

    folder: Path
    source: Source

    @property
    def file(self) -> Path:
        """The copy: it bears the name of the source, which messages may then name."""
        return self.folder / "data" / Path(self.source.path).name

    def new_part(self) -> Path:
        """Return a file of the source's size to copy into; `publish` makes it the copy."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=_PART, dir=self.folder)
        with open(descriptor, "wb") as file:
            if self.source.size_bytes:
                os.posix_fallocate(file.fileno(), 0, self.source.size_bytes)  # a full disk is met here, not later
        return Path(name)

    def is_complete(self) -> bool:
        """Whether the copy is there, as it was published."""
        try:
            record = read_json(self.folder / _RECORD, dict)
            facts = self.file.stat()
        except (FileNotFoundError, RecordError):
            return False
        return bool(record == self._record(facts.st_mtime_ns) and facts.st_size == self.source.size_bytes)

    def publish(self, part: Path) -> None:
        """Make a part that is complete the copy, all at once; where another job was faster, drop it."""
        if self.is_complete():
            part.unlink()
            return
        (self.folder / _RECORD).unlink(missing_ok=True)
        self.file.parent.mkdir(exist_ok=True)
        part.chmod(0o400)
        part.replace(self.file)
        write_json(self.folder / _RECORD, self._record(self.file.stat().st_mtime_ns))

    def _record(self, staged_mtime_ns: int) -> dict[str, str | int]:
        source = self.source
        facts: dict[str, str | int] = {"source": source.path, "size": source.size_bytes, "mtime_ns": source.mtime_ns}
        return {**facts, "staged_mtime_ns": staged_mtime_ns}


def staged_root(folder: Path) -> Path:
    """Return this user's folder for copies on this node, inside `folder`."""
    return folder / f"mpidp-stage-{os.getuid()}-{socket.gethostname()}"


def place_of(root: Path, source: Source) -> Place:
    """Return where the copy of a source belongs."""
    identity = f"{os.path.realpath(source.path)}\0{source.size_bytes}\0{source.mtime_ns}"
    return Place(root / hashlib.sha256(identity.encode()).hexdigest()[:16], source)


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Keep other processes of the node out of `root`, which is made if needed and removed if left empty.

    Raises `DataError` if it belongs to another user, who could change what is in it.
    """
    descriptor = _lock(root)
    try:
        try:
            yield
        finally:
            if not any(root.iterdir()):
                root.rmdir()
    finally:
        os.close(descriptor)


def _lock(root: Path) -> int:
    while True:
        root.mkdir(mode=0o700, exist_ok=True)
        try:
            descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:  # its last user found it empty and removed it
            continue
        facts = os.fstat(descriptor)
        if facts.st_uid != os.getuid() or facts.st_mode & 0o077:
            os.close(descriptor)
            raise DataError(f"{root}: others may read or write it (owner {facts.st_uid}); remove it or give a folder")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if root.exists() and os.path.samestat(facts, root.stat()):
            return descriptor
        os.close(descriptor)


class Mark:
    """Says that this process uses some places of `root`, until `release`. Make and release it inside `locked`."""

    def __init__(self, root: Path, places: Sequence[Place]) -> None:
        self.root = root
        self._descriptor, self._name = tempfile.mkstemp(prefix=_MARK, dir=root)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        # Who it is tells people; the lock is what counts.
        who = {"pid": os.getpid(), "host": socket.gethostname(), "job": os.environ.get("SLURM_JOB_ID", "")}
        text = json.dumps({**who, "places": [place.folder.name for place in places]})
        try:
            Path(self._name).write_text(text)
        except OSError:  # the disk is full; nobody could read half a mark
            self.release()
            raise

    def release(self) -> None:
        """Say that this process uses them no more."""
        Path(self._name).unlink(missing_ok=True)
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also for children that were forked and hold the file open
        os.close(self._descriptor)


def sweep(root: Path) -> None:
    """Remove what no process uses from `root`. Call it inside `locked`."""
    used: set[str] = set()
    for mark in list(root.glob(f"{_MARK}*")):
        if _is_locked(mark):
            used.update(json.loads(mark.read_text())["places"])
        else:
            mark.unlink()
    for folder in list(root.iterdir()):
        if folder.is_dir() and folder.name not in used:
            shutil.rmtree(folder)


def _is_locked(mark: Path) -> bool:
    with open(mark, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
