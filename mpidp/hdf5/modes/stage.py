"""The mode `stage`: verified copies of the files on a disk of each node, kept as long as they are used.

The ranks of a node copy ranges of the files in parallel, and CRC-32 tells whether the bytes read back are those that
were read. All loaders and jobs of a user share the copies. Each copy has a folder of its own; a process that uses it
keeps a lock on a mark, a file that names the folder. The kernel releases the lock however the process ends, so a folder
that no locked mark names is a leftover, for instance of a job that was killed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import socket
import stat
import tempfile
import time
import warnings
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mpidp.errors import DataError, RecordError
from mpidp.world.record_file import read_json, write_json
from mpidp.world.system import file_system

if TYPE_CHECKING:
    from mpidp.world.world import World

RANGE_BYTES = 64 * 2**20
VARIABLES = ("SLURM_TMPDIR", "TMPDIR")
_MARK, _PART, _RECORD = "user-", "part-", "record.json"
_COPIED_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Source:
    """A file as it was when staging began. Another size or time of change makes another file of it."""

    path: str
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: str) -> Source:
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

    @classmethod
    def of(cls, root: Path, source: Source) -> Place:
        """Return the place of a source's copy in `root`."""
        identity = f"{os.path.realpath(source.path)}\0{source.size_bytes}\0{source.mtime_ns}"
        return cls(root / hashlib.sha256(identity.encode()).hexdigest()[:16], source)

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
        path, size_bytes, mtime_ns = astuple(self.source)
        return {"source": path, "size": size_bytes, "mtime_ns": mtime_ns, "staged_mtime_ns": staged_mtime_ns}


def staged_root(folder: Path) -> Path:
    """Return this user's folder for copies on this node, inside `folder`."""
    return folder / f"mpidp-stage-{os.getuid()}-{socket.gethostname()}"


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Keep other processes of the node out of `root`, which is made if needed and removed if left empty."""
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
        facts = os.fstat(descriptor)  # another user could change what is in a folder of his
        if facts.st_uid != os.getuid() or facts.st_mode & 0o077:
            os.close(descriptor)
            raise DataError(f"{root}: others may read or write it (owner {facts.st_uid}); remove it or give a folder")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(facts, root.stat()):
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
        with open(mark, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                used.update(json.loads(mark.read_text())["places"])
            else:
                mark.unlink()
    for folder in list(root.iterdir()):
        if folder.is_dir() and folder.name not in used:
            shutil.rmtree(folder)


def copy_range(source: str, target: str, start: int, stop: int) -> None:
    """Copy bytes [start, stop) of `source` to the same place in `target`, which exists; read them back and compare."""
    block = memoryview(bytearray(min(_COPIED_BYTES, max(1, stop - start))))
    with _open(source, os.O_RDONLY) as reading, _open(target, os.O_RDWR) as writing:
        copied = 0
        for at, part in _blocks(source, reading, start, stop, block):
            copied = zlib.crc32(part, copied)
            with _named(target, "written"):
                while part:
                    count = os.pwrite(writing, part, at)
                    at, part = at + count, part[count:]
        with _named(target, "written"):
            os.fdatasync(writing)
        # What is still in memory would only be compared with itself.
        os.posix_fadvise(writing, start, stop - start, os.POSIX_FADV_DONTNEED)
        found = 0
        for _, part in _blocks(target, writing, start, stop, block):
            found = zlib.crc32(part, found)
    if found != copied:
        raise DataError(
            f"{target}: bytes {start} to {stop - 1} have CRC-32 {found:08x} when read back, but {copied:08x} were "
            f"copied from {source}; the disk may be failing: stage to another folder, or leave this node out"
        )


def _blocks(path: str, descriptor: int, start: int, stop: int, block: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the bytes [start, stop) of a file, in order; each part is overwritten by the next."""
    while start < stop:
        with _named(path, "read"):
            count = os.preadv(descriptor, [block[: min(len(block), stop - start)]], start)
        if count == 0:
            raise DataError(f"{path}: ends at byte {start}, though it had at least {stop}; something cut it off")
        yield start, block[:count]
        start += count


@contextmanager
def _open(path: str, flags: int) -> Iterator[int]:
    with _named(path, "opened"):
        descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _named(path: str, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be {what} while files are copied to the node: {error.strerror}") from error


@dataclass(frozen=True)
class _Plan:
    """What the ranks of a node do: all places, the copies that are to be made, and what to warn about."""

    root: Path
    places: tuple[Place, ...]
    parts: tuple[tuple[Place, Path], ...]
    warning: str

    def ranges(self) -> Iterator[tuple[Place, Path, int, int]]:
        """Yield the ranges of bytes to be copied, which ranks take in turn."""
        for place, part in self.parts:
            size_bytes = place.source.size_bytes
            for start in range(0, size_bytes, RANGE_BYTES):
                yield place, part, start, min(start + RANGE_BYTES, size_bytes)


class Staging:
    """Copies of files on this node: `paths` has where the copy of each lies. Making one is collective; `close` is not.

    Copies are removed when the last process on the node that uses them has closed them or has ended; what a killed job
    left is removed by the next staging of the same user. `folder` is one that exists on each node; $SLURM_TMPDIR,
    $TMPDIR or /tmp where None. Raises `DataError` on every rank where a copy cannot be made or verified, and warns once
    if the folder can hardly be faster.
    """

    def __init__(self, sources: Sequence[str], world: World, folder: str | Path | None = None) -> None:
        start_s = time.perf_counter()
        self._marks: list[Mark] = []
        plan: _Plan | None = None
        try:
            with world.raise_on_all_ranks("preparing to copy files to the node"):
                if world.local_rank == 0:
                    plan = _prepare(sources, choose_folder(folder, os.environ), self._marks)
            plan = cast(_Plan, world.node_comm.bcast(plan, root=0))
            with world.raise_on_all_ranks("copying files to the node"):
                if world.local_rank:
                    with _usable(plan.root), locked(plan.root):
                        self._marks.append(Mark(plan.root, plan.places))
                for place, part, start, stop in list(plan.ranges())[world.local_rank :: world.local_size]:
                    copy_range(place.source.path, str(part), start, stop)
            with world.raise_on_all_ranks("making the copies known"):
                if world.local_rank == 0:
                    _publish(plan)
        except BaseException:
            _leave(self._marks, os.getpid(), [part for _, part in plan.parts] if plan else ())
            raise
        # Also at exit, and when this is collected.
        self._finalizer = weakref.finalize(self, _leave, self._marks, os.getpid(), ())
        self.paths: dict[str, str] = {place.source.path: str(place.file) for place in plan.places}
        self.line = _line(plan, time.perf_counter() - start_s)
        found = world.comm.gather(plan.warning, root=0)
        if warning := next(filter(None, found or ()), ""):
            warnings.warn(warning, stacklevel=2)

    def close(self) -> None:
        """Say that this process needs the copies no more. Not collective."""
        self._finalizer()


def choose_folder(folder: str | Path | None, environment: Mapping[str, str]) -> Path:
    """Return the folder to copy to: the one given, or the first that the environment names."""
    named = [(name, environment[name]) for name in VARIABLES if environment.get(name)]
    origin, path = named[0] if named else ("the system", tempfile.gettempdir())
    if folder is not None:
        origin, path = "the folder to stage to", os.path.expandvars(os.path.expanduser(folder))
    if not os.path.isdir(path):
        raise DataError(
            f"{path}, given by {origin}, is no folder on {socket.gethostname()}; give one that every node has"
        )
    return Path(path).absolute()


def _prepare(sources: Sequence[str], folder: Path, marks: list[Mark]) -> _Plan:
    """Make room and marks, and plan what is to be copied; what others left behind is removed first."""
    root = staged_root(folder)
    found = [Source.of(path) for path in dict.fromkeys(sources)]
    with _usable(root), locked(root):
        sweep(root)
        places = tuple(Place.of(root, source) for source in found)
        missing = [place for place in places if not place.is_complete()]
        needed, free = sum(place.source.size_bytes for place in missing), file_system(root).free_bytes
        if needed > free:
            raise DataError(
                f"{folder} on {socket.gethostname()} has {free:,} bytes free, but {needed:,} are needed for copies of "
                f'{len(missing)} file(s); give another folder ($SLURM_TMPDIR, $TMPDIR), or take mode="stream"'
            )
        marks.append(Mark(root, places))
        parts = tuple((place, place.new_part()) for place in missing)
    return _Plan(root, places, parts, _oddity(folder, [source.path for source in found]))


def _oddity(folder: Path, sources: Sequence[str]) -> str:
    """Return why reading copies in `folder` can hardly be faster, or ""."""
    target = file_system(folder)
    where = f'mode="stage" copies to {folder} on {socket.gethostname()}'
    if target.is_network:
        return f"{where}, which is a network file system ({target.kind}): give a folder on the node's own disk"
    same = [path for path in sources if os.stat(path).st_dev == target.device]
    if same:
        return f"{where}, on the same file system as {same[0]}: that gains nothing; give another folder"
    return ""


def _publish(plan: _Plan) -> None:
    with _usable(plan.root), locked(plan.root):
        for place, part in plan.parts:
            if Source.of(place.source.path) != place.source:
                raise DataError(f"{place.source.path}: changed while it was copied; start again when it is complete")
            place.publish(part)


def _leave(marks: list[Mark], pid: int, parts: Sequence[Path]) -> None:
    """Release marks, and remove copies that nobody else uses. In a fork of the process it does nothing."""
    if os.getpid() != pid or not marks:
        return
    root = marks[0].root
    try:
        for part in parts:
            part.unlink(missing_ok=True)
        with locked(root):
            while marks:
                marks.pop().release()
            sweep(root)
    except OSError as error:  # often at exit, where an exception would be taken for the failure of the job
        warnings.warn(f"{root}: copies of staged files could not be removed: {error}; remove it by hand", stacklevel=2)


@contextmanager
def _usable(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f"{root} on {socket.gethostname()}"
        raise DataError(f"{where}: files cannot be staged there: {error}; give another folder") from error


def _line(plan: _Plan, seconds: float) -> str:
    copied = sum(stop - start for _, _, start, stop in plan.ranges())
    total = sum(place.source.size_bytes for place in plan.places)
    return (
        f"{len(plan.places)} file(s), {total / 2**20:,.1f} MiB, staged in {plan.root.parent} on each node: "
        f"{copied / 2**20:,.1f} MiB copied and verified in {seconds:.1f} s, the rest was there"
    )
