"""`mpidp data convert` and `make`: write an HDF5 file from a source, whole or not at all.

The plan cuts the conversion into tasks, which threads read and compress. Until the file is complete it lies beside the
target, in a folder TARGET.*.part with what a source had to unpack.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import numpy as np

from mpidp.errors import ConfigError, DataError
from mpidp.hdf5.files.file import open_file
from mpidp.hdf5.plan import Bijection, IntArray, check_seed
from mpidp.hdf5.write import MOST_CHUNK_BYTES, EncodedChunk, Filters, NewDataset, encode, parse_filters, write_file
from mpidp.tools.data.csv import CsvSource
from mpidp.tools.data.hdf5_source import HDF5Source
from mpidp.tools.data.images import ImageSource
from mpidp.tools.data.options import ConvertOptions, MakeOptions, Written
from mpidp.tools.data.source import Source, SourceField, SyntheticSource, open_npy, open_npz
from mpidp.tools.table import Ticker, size_text
from mpidp.world.record_file import flush_folder

DEFAULT_CHUNK_BYTES = 512 << 10
# Small files get smaller chunks, down to this: streams and ranks need some chunks to share.
SMALL_CHUNK_BYTES, ENOUGH_CHUNKS = 16 << 10, 64
# A task is long beside the time to start it, and short beside the memory of any machine.
TASK_BYTES = 4 << 20
# So many chunks of the source are in a task, of which the first and the last may belong to two tasks.
READ_STRETCHES = 4
# Rows as they came, rows shuffled, the part of the source being read, and results of this task and of one that waits.
COPIES = 5


@dataclass(frozen=True)
class Layout:
    """How the file is to be written; `chunk_rows` and `chunk_bytes` are 0 where the default is wanted."""

    filters: Filters
    chunk_rows: int = 0
    chunk_bytes: int = 0
    shuffle_seed: int | None = None


@dataclass(frozen=True)
class Group:
    """Fields with equal numbers of rows, by number. They have chunks of equal height and are made together."""

    fields: tuple[int, ...]
    row_bytes: int
    num_rows: int
    chunk_rows: int
    task_rows: int


@dataclass(frozen=True)
class Task:
    """Rows [start, stop) of the target, of all fields of a group; `start` begins a chunk."""

    group: Group
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its rows before they are compressed."""
        return (self.stop - self.start) * self.group.row_bytes


@dataclass(frozen=True)
class Plan:
    """What is written where."""

    datasets: tuple[NewDataset, ...]
    groups: tuple[Group, ...]
    layout: Layout

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks, in the order of the target's rows."""
        return tuple(
            Task(group, start, min(start + group.task_rows, group.num_rows))
            for group in self.groups
            for start in range(0, group.num_rows, group.task_rows)
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows before they are compressed."""
        return sum(group.num_rows * group.row_bytes for group in self.groups)

    def rows(self, task: Task) -> IntArray:
        """Return the source's rows (int64) that become rows [start, stop) of the target."""
        places = np.arange(task.start, task.stop, dtype=np.int64)
        if self.layout.shuffle_seed is None:
            return places
        return Bijection(task.group.num_rows, self.layout.shuffle_seed, 0)(places)


def make_plan(source: Source, layout: Layout, memory_bytes: int, workers: int) -> Plan:
    """Cut a conversion into tasks.

    Raises:
        ConfigError: rows of datasets of different length cannot be shuffled together.
        DataError: a field without values, names that exclude each other, or a row too large for a chunk.
    """
    fields = source.fields
    for field in fields:
        if field.row_bytes == 0:
            raise DataError(f'dataset "{field.name}" has rows of shape {field.shape} without values; leave it out')
        clash = [other.name for other in fields if other.name.startswith(f"{field.name}/")]
        if clash:
            raise DataError(f'"{field.name}" and "{clash[0]}" cannot both be in an HDF5 file; choose by --fields')
    lengths = {field.name: field.num_rows for field in fields}
    if layout.shuffle_seed is not None and len(set(lengths.values())) > 1:
        found = ", ".join(f'"{name}" has {length}' for name, length in lengths.items())
        raise ConfigError(
            f"--shuffle-rows needs datasets of one length: {found}. Convert those that belong together by --fields."
        )
    most_bytes = memory_bytes // (COPIES * workers)
    groups: list[Group] = []
    for length in dict.fromkeys(lengths.values()):
        members = tuple(number for number, field in enumerate(fields) if field.num_rows == length)
        groups.append(_group(members, [fields[number] for number in members], layout, most_bytes))
    chunk_rows = {number: group.chunk_rows for group in groups for number in group.fields}
    datasets = tuple(
        NewDataset(
            field.name,
            (field.num_rows, *field.shape),
            field.dtype,
            chunk_rows[number],
            field.type_name or str(field.dtype),
            field.like,
            field.fill,
        )
        for number, field in enumerate(fields)
    )
    return Plan(datasets, tuple(groups), layout)


def default_chunk_rows(num_rows: int, row_bytes: int) -> int:
    """Return the chunk height that is used where the user names none."""
    usual = DEFAULT_CHUNK_BYTES // row_bytes
    small = max(num_rows // ENOUGH_CHUNKS, SMALL_CHUNK_BYTES // row_bytes)
    return max(1, min(usual, small, num_rows))


def _group(numbers: tuple[int, ...], fields: list[SourceField], layout: Layout, most_bytes: int) -> Group:
    num_rows = fields[0].num_rows
    largest = max(fields, key=lambda field: field.row_bytes)
    chunk_rows = _chunk_rows(largest, layout)
    row_bytes = sum(field.row_bytes for field in fields)
    if layout.shuffle_seed is None:
        # Chunks of the source are decoded whole: where those are large, so are tasks, or most would be done twice.
        read_bytes = READ_STRETCHES * max(field.read_rows for field in fields) * row_bytes
        task_bytes = min(max(TASK_BYTES, read_bytes), most_bytes)
    else:
        task_bytes = most_bytes
    return Group(numbers, row_bytes, num_rows, chunk_rows, max(1, task_bytes // (row_bytes * chunk_rows)) * chunk_rows)


def _chunk_rows(largest: SourceField, layout: Layout) -> int:
    """Return the height of the chunks of a group; the field with the largest rows decides."""
    if layout.chunk_rows:
        chunk_rows = layout.chunk_rows
    elif layout.chunk_bytes:
        chunk_rows = layout.chunk_bytes // largest.row_bytes
    else:
        chunk_rows = default_chunk_rows(largest.num_rows, largest.row_bytes)
    chunk_rows = max(1, min(chunk_rows, largest.num_rows))
    if chunk_rows * largest.row_bytes > MOST_CHUNK_BYTES:
        raise DataError(
            f'dataset "{largest.name}": chunks of {chunk_rows} rows of {largest.row_bytes} bytes are larger than the '
            f"{MOST_CHUNK_BYTES} bytes that HDF5 allows; ask for less by --chunk-rows, or split the samples"
        )
    return chunk_rows


MakeSource = Callable[[Path], Source]
_MOST_NAMED = 10


def convert(
    make_source: MakeSource, target: str, options: Written, shuffle_seed: int | None = None, memory_bytes: int = 1 << 30
) -> str:
    """Write the target and return a line that says what it holds.

    A target that exists is kept until its successor is complete. Progress is told on the standard error.

    Args:
        make_source: opens the source; it may unpack files into the folder that it is given.
        target: path of the file to write.
        options: chunks, filters, threads.
        shuffle_seed: what a random order of the rows follows from; None for the source's order.
        memory_bytes: how much all threads together may hold; more only where a single chunk needs it.

    Raises:
        ConfigError: the target exists, or options that do not fit the source.
        DataError: a source that cannot be read, or a target that cannot be written.
    """
    filters = parse_filters(options.compression, not options.no_byte_shuffle, options.fletcher32)
    layout = Layout(filters, options.chunk_rows, options.chunk_bytes, shuffle_seed)
    path = _checked_target(target, options.overwrite)
    workers = options.workers or len(os.sched_getaffinity(0))
    folder, name = os.path.split(path)
    try:
        scratch = tempfile.TemporaryDirectory(prefix=f"{name}.", suffix=".part", dir=folder)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error.strerror}; choose another folder") from error
    with scratch:
        source = make_source(Path(scratch.name))
        with closing(source):
            plan = make_plan(source, layout, memory_bytes, workers)
            for text in source.remarks:
                _remark(text)
            written, chunks = os.path.join(scratch.name, "whole.h5"), _encoded(source, plan, workers)
            write_file(written, plan.datasets, filters, chunks, source.texts, source.template, _remark)
        if not options.overwrite:
            _check_absent(path)  # once more: it took a while
        os.replace(written, path)
        flush_folder(Path(folder))
    return _summary(path, plan)


def _remark(text: str) -> None:
    print(f"mpidp: {text}", file=sys.stderr, flush=True)


def _encoded(source: Source, plan: Plan, workers: int) -> Iterator[EncodedChunk]:
    """Yield all chunks, task by task; so many tasks as there are threads are in work at a time, and one more."""
    tasks, ticker = iter(plan.tasks), Ticker("converting", plan.num_bytes)
    pool = ThreadPoolExecutor(workers)
    try:
        running: list[tuple[Task, Future[list[EncodedChunk]]]] = []
        while True:
            while len(running) <= workers and (task := next(tasks, None)) is not None:
                running.append((task, pool.submit(_encode_task, source, plan, task)))
            if not running:
                return
            done, future = running.pop(0)
            yield from future.result()
            ticker.add(done.num_bytes)
    finally:
        pool.shutdown(cancel_futures=True)


def _encode_task(source: Source, plan: Plan, task: Task) -> list[EncodedChunk]:
    """Return the chunks of one task. In any thread."""
    members = [(number, plan.datasets[number]) for number in task.group.fields]
    values = source.take([new.name for _, new in members], plan.rows(task))
    chunks: list[EncodedChunk] = []
    for number, new in members:
        encoded = encode(values.pop(new.name), new, plan.layout.filters)
        starts = range(task.start, task.stop, new.chunk_rows)
        chunks += [EncodedChunk(number, start, *chunk) for start, chunk in zip(starts, encoded, strict=True)]
    return chunks


def _checked_target(target: str, overwrite: bool) -> str:
    path = str(Path(os.path.expanduser(target)).absolute())
    if os.path.isdir(path):
        raise ConfigError(f"{target}: this is a folder; give the name of the HDF5 file to write")
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise ConfigError(f"{target}: there is no folder {folder}; make it first")
    if not overwrite:
        _check_absent(path)
    return path


def _check_absent(path: str) -> None:
    if os.path.lexists(path):
        raise ConfigError(f"{path}: exists; give --overwrite to replace it, or another name")


def _summary(path: str, plan: Plan) -> str:
    with open_file(path, 0) as file:
        missing = [new.name for new in plan.datasets if file[new.name].shape != new.shape]
    if missing:
        raise DataError(f"{path}: dataset {missing[0]} is not as it was written; the disk may be failing")
    parts = [
        f"{new.name} {' x '.join(map(str, new.shape))} {new.type_name} in chunks of {new.chunk_rows}"
        for new in plan.datasets[:_MOST_NAMED]
    ]
    if len(plan.datasets) > _MOST_NAMED:
        parts.append(f"and {len(plan.datasets) - _MOST_NAMED:,} more")
    sizes = f"{size_text(os.path.getsize(path))}, {size_text(plan.num_bytes)} decoded"
    return f"{path}: {'; '.join([*parts, str(plan.layout.filters), sizes])}"


_HDF5_SUFFIXES = (".h5", ".hdf5", ".he5", ".hdf", ".nc", ".mat")
# Suffixes that no HDF5 file has.
_OTHER_SUFFIXES = (".npy", ".npz", ".csv", ".tsv", ".txt", ".png", ".jpg", ".jpeg")
_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_ONLY = {
    "npy": (),
    "npz": ("fields",),
    "hdf5": ("fields", "expand_external", "stack_groups"),
    "images": ("resize", "mode"),
    "csv": ("label", "columns", "dtype", "delimiter", "no_header", "empty_as_nan"),
}


def convert_by(options: ConvertOptions) -> str:
    """Convert as asked and return what the target holds; raises `ConfigError` and `DataError`."""
    *sources, target = options.paths
    kind = _kind(sources)
    _check_options(options, kind)
    if Path(target).suffix.lower() in ("", *_OTHER_SUFFIXES):
        raise ConfigError(
            f"{target}: the last word is the HDF5 file to write; expected a name that ends in .h5, .hdf5 or the like"
        )
    if os.path.exists(target) and any(os.path.samefile(path, target) for path in sources):
        raise ConfigError(f"{target}: is source and target; write to another name, then rename it")
    if len(set(options.fields)) < len(options.fields):
        raise ConfigError(f"--fields={','.join(options.fields)}; give each only once.")
    if options.fields and options.stack_groups is not None:
        raise ConfigError("--fields and --stack-groups both say what to take; give one of them.")
    if options.shuffle_rows is not None:
        check_seed(options.shuffle_rows)
    return convert(_opener(kind, sources, options), target, options, options.shuffle_rows, options.memory)


def make_by(options: MakeOptions) -> str:
    """Make synthetic data as asked and return what the target holds; raises `ConfigError` and `DataError`."""
    source = SyntheticSource(options.field, options.rows, options.classes, options.seed)
    return convert(lambda scratch: source, options.target, options)


def _kind(sources: list[str]) -> str:
    """Return what kind of source the paths are, by folder, name, or first bytes."""
    for path in sources:
        if not os.path.exists(path):
            raise DataError(f"{path}: no such file or folder; check the path")
    kinds = {path: _kind_of(path) for path in sources}
    if len(sources) > 1 and set(kinds.values()) != {"npy"}:
        raise ConfigError(
            f"{len(sources)} sources were given ({', '.join(sources)}); several are understood for .npy files only"
        )
    return kinds[sources[0]]


def _kind_of(path: str) -> str:
    if os.path.isdir(path):
        return "images"
    suffix = Path(path).suffix.lower()
    if suffix in _HDF5_SUFFIXES or _is_hdf5(path):
        return "hdf5"
    kinds = {".npy": "npy", ".npz": "npz", ".csv": "csv", ".tsv": "csv", ".txt": "csv"}
    if suffix not in kinds:
        raise ConfigError(
            f"{path}: unknown kind of source; expected .npy, .npz, .csv, .h5 or .hdf5, or a folder of images"
        )
    return kinds[suffix]


def _is_hdf5(path: str) -> bool:
    """Return whether a file, whatever its name, begins as HDF5 files do, or goes on so after a block of the user's."""
    try:
        with open(path, "rb") as file:
            for start in (0, 512, 1024, 2048):
                file.seek(start)
                if file.read(len(_HDF5_SIGNATURE)) == _HDF5_SIGNATURE:
                    return True
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return False


def _check_options(options: ConvertOptions, kind: str) -> None:
    """Raise `ConfigError` for an option that this kind of source has no use for: it would be ignored silently."""
    defaults = {field.name: field.default for field in fields(ConvertOptions)}
    for other, names in _ONLY.items():
        for name in names:
            if name not in _ONLY[kind] and getattr(options, name) != defaults[name]:
                raise ConfigError(f"--{name.replace('_', '-')} is for sources of kind {other}; this one is {kind}.")


def _opener(kind: str, sources: list[str], options: ConvertOptions) -> Callable[[Path], Source]:
    path = sources[0]
    openers: dict[str, Callable[[Path], Source]] = {
        "npy": lambda scratch: open_npy(sources),
        "npz": lambda scratch: open_npz(path, options.fields, scratch),
        "hdf5": lambda scratch: HDF5Source(path, options.fields, options.expand_external, options.stack_groups),
        "images": lambda scratch: ImageSource(path, options),
        "csv": lambda scratch: CsvSource(path, options, scratch),
    }
    return openers[kind]
