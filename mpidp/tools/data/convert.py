"""`mpidp data convert` and `make`: write an HDF5 file from a source, whole or not at all.

Until it is complete it lies beside the target, in a folder TARGET.*.part with what a source had to unpack.
"""

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import fields
from pathlib import Path

from mpidp.errors import ConfigError, DataError
from mpidp.hdf5.files.file import open_file
from mpidp.hdf5.plan import check_seed
from mpidp.hdf5.write import EncodedChunk, encode, parse_filters, write_file
from mpidp.tools.data.csv import CsvSource
from mpidp.tools.data.hdf5_source import HDF5Source
from mpidp.tools.data.images import ImageOptions, ImageSource
from mpidp.tools.data.make import SyntheticSource
from mpidp.tools.data.options import ConvertOptions, MakeOptions, Written
from mpidp.tools.data.plan import Layout, Plan, Task, make_plan
from mpidp.tools.data.source import Source, open_npy, open_npz
from mpidp.tools.table import Ticker, size_text
from mpidp.world.record_file import flush_folder

MakeSource = Callable[[Path], Source]
_MOST_NAMED = 10


def convert(
    make_source: MakeSource,
    target: str,
    options: Written,
    shuffle_seed: int | None = None,
    memory_bytes: int = 1 << 30,
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
            written = os.path.join(scratch.name, "whole.h5")
            _write(source, plan, written, workers)
        if not options.overwrite:
            _check_absent(path)  # once more: it took a while
        os.replace(written, path)
        flush_folder(Path(folder))
    return _summary(path, plan)


def _write(source: Source, plan: Plan, path: str, workers: int) -> None:
    for text in source.remarks:
        _remark(text)
    chunks = _encoded(source, plan, workers)
    write_file(path, plan.datasets, plan.layout.filters, chunks, source.texts, source.template, _remark)


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
        "images": lambda scratch: ImageSource(path, ImageOptions(_size(options.resize), options.mode)),
        "csv": lambda scratch: CsvSource(path, options, scratch),
    }
    return openers[kind]


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise ConfigError(f"--resize={text}; expected WIDTHxHEIGHT, such as 224x224.")
    return int(found[1]), int(found[2])
