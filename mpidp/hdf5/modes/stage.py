"""The mode `stage`: verified copies of the files on a disk of each node, kept as long as they are used.

The ranks of a node copy ranges of the files in parallel. Copies are shared by all loaders and jobs of a user there.
CRC-32 tells whether the bytes read back from the disk are those that were read.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
import warnings
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mpidp.errors import DataError
from mpidp.hdf5.modes.stage_folder import Mark, Place, Source, locked, place_of, staged_root, sweep
from mpidp.world.system import file_system

if TYPE_CHECKING:
    from mpidp.world.world import World


_COPIED_BYTES = 8 * 2**20


def copy_range(source: str, target: str, start: int, stop: int) -> None:
    """Copy bytes [start, stop) of `source` to the same place in `target`, which exists.

    Raises `DataError` when one cannot be read or written, and when the target holds something else afterwards.
    """
    block = memoryview(bytearray(min(_COPIED_BYTES, max(1, stop - start))))
    with _open(source, os.O_RDONLY) as reading, _open(target, os.O_RDWR) as writing:
        copied = 0
        for at, part in _blocks(source, reading, start, stop, block):
            copied = zlib.crc32(part, copied)
            _write(target, writing, at, part)
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


def _write(path: str, descriptor: int, at: int, part: memoryview) -> None:
    with _named(path, "written"):
        while part:
            count = os.pwrite(descriptor, part, at)
            at, part = at + count, part[count:]


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


RANGE_BYTES = 64 * 2**20
VARIABLES = ("SLURM_TMPDIR", "TMPDIR")


@dataclass(frozen=True)
class _Plan:
    """What the ranks of a node do: where copies lie, those to be made (None: it is there), and what is odd."""

    root: Path
    places: tuple[Place, ...]
    parts: tuple[Path | None, ...]
    warning: str

    def ranges(self) -> Iterator[tuple[Place, Path, int, int]]:
        """Yield what is to be copied, in pieces that ranks take in turn."""
        for place, part in zip(self.places, self.parts, strict=True):
            for start in range(0, place.source.size_bytes if part else 0, RANGE_BYTES):
                assert part is not None
                yield place, part, start, min(start + RANGE_BYTES, place.source.size_bytes)


class Staging:
    """Copies of files on this node. Making one is collective; `close` is not.

    Copies are removed when the last process on the node that uses them has closed them or has ended; what a killed
    job left is removed by the next staging of the same user. Warns once if the folder can hardly be faster.

    Args:
        sources: the files that hold data (links inside HDF5 files are not followed).
        world: the ranks.
        folder: an existing folder on each node; $SLURM_TMPDIR, $TMPDIR or /tmp where None.

    Raises:
        DataError: on every rank: a node has no room, or something cannot be read, written or verified.

    Attributes:
        paths: where the copy of each of `sources` lies.
        line: what was done, as rank 0's node saw it.
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
            _leave(self._marks, os.getpid(), _parts(plan))
            raise
        # Also at exit, and when this is collected.
        self._finalizer = weakref.finalize(self, _leave, self._marks, os.getpid(), ())
        self.paths: dict[str, str] = {place.source.path: str(place.file) for place in plan.places}
        self.line = _line(plan, time.perf_counter() - start_s)
        _warn(plan.warning, world)

    def close(self) -> None:
        """Say that this process needs the copies no more. Not collective."""
        self._finalizer()


def choose_folder(folder: str | Path | None, environment: Mapping[str, str]) -> Path:
    """Return the folder to copy to: the one given, or the first that the environment names.

    Raises `DataError` where there is no such folder.
    """
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
        places = tuple(place_of(root, source) for source in found)
        missing = [place for place in places if not place.is_complete()]
        _check_room(root, missing)
        marks.append(Mark(root, places))
        parts = tuple(place.new_part() if place in missing else None for place in places)
    return _Plan(root, places, parts, _oddity(folder, [source.path for source in found]))


def _check_room(root: Path, missing: Sequence[Place]) -> None:
    needed = sum(place.source.size_bytes for place in missing)
    free = file_system(root).free_bytes
    if needed > free:
        raise DataError(
            f"{root.parent} on {socket.gethostname()} has {free:,} bytes free, but {needed:,} are needed for copies of "
            f'{len(missing)} file(s); give another folder ($SLURM_TMPDIR, $TMPDIR), or take mode="stream"'
        )


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
        for place, part in zip(plan.places, plan.parts, strict=True):
            if part is None:
                continue
            if Source.of(place.source.path) != place.source:
                raise DataError(f"{place.source.path}: changed while it was copied; start again when it is complete")
            place.publish(part)


def _parts(plan: _Plan | None) -> tuple[Path, ...]:
    return () if plan is None else tuple(part for part in plan.parts if part is not None)


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
        host = socket.gethostname()
        raise DataError(f"{root} on {host}: files cannot be staged there: {error}; give another folder") from error


def _warn(warning: str, world: World) -> None:
    """Warn once, of the first node that has a reason. Collective."""
    found = world.comm.gather(warning, root=0)
    warning = next(filter(None, found or ()), "")
    if warning:
        warnings.warn(warning, stacklevel=3)


def _line(plan: _Plan, seconds: float) -> str:
    copied = sum(stop - start for _, _, start, stop in plan.ranges())
    total = sum(place.source.size_bytes for place in plan.places)
    return (
        f"{len(plan.places)} file(s), {total / 2**20:,.1f} MiB, staged in {plan.root.parent} on each node: "
        f"{copied / 2**20:,.1f} MiB copied and verified in {seconds:.1f} s, the rest was there"
    )
