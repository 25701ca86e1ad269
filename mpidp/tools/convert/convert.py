"""A source, a target and a layout enter; an HDF5 file leaves, whole or not at all. Behind `mpidp data convert`.

Until it is complete it lies beside the target, in a folder TARGET.*.part with what a source had to unpack.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from mpidp.errors import ConfigError, DataError
from mpidp.hdf5.files.file import open_file
from mpidp.hdf5.write import EncodedChunk, encode, write_file
from mpidp.tools.convert.plan import Layout, Plan, Task, make_plan
from mpidp.tools.convert.source import Source
from mpidp.tools.table import size_text
from mpidp.tools.ticker import Ticker
from mpidp.world.record_file import flush_folder

MakeSource = Callable[[Path], Source]
_MOST_NAMED = 10


def convert(
    make_source: MakeSource,
    target: str,
    layout: Layout,
    *,
    workers: int = 0,
    memory_bytes: int = 1 << 30,
    overwrite: bool = False,
    speaks: bool = True,
) -> str:
    """Write the target and return a line that says what it holds.

    A target that exists is kept until its successor is complete.

    Args:
        make_source: opens the source; it may unpack files into the folder that it is given.
        target: path of the file to write.
        layout: chunks, filters, order.
        workers: threads that read and encode; 0 for one a core that this process may use.
        memory_bytes: how much all threads together may hold; more only where a single chunk needs it.
        overwrite: whether a file of that name may be replaced.
        speaks: whether to tell of progress on the standard error.

    Raises:
        ConfigError: the target exists, or options that do not fit the source.
        DataError: a source that cannot be read, or a target that cannot be written.
    """
    path = _checked_target(target, overwrite)
    workers = workers or len(os.sched_getaffinity(0))
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
            _write(source, plan, written, workers, speaks)
        if not overwrite:
            _check_absent(path)  # once more: it took a while
        os.replace(written, path)
        flush_folder(Path(folder))
    return _summary(path, plan)


def task_bytes(plan: Plan, task: Task) -> int:
    """Return the bytes of a task's rows before they are compressed."""
    row_bytes = sum(plan.datasets[number].dtype.itemsize * _row_size(plan, number) for number in task.group.fields)
    return (task.stop - task.start) * row_bytes


def _row_size(plan: Plan, number: int) -> int:
    size = 1
    for length in plan.datasets[number].shape[1:]:
        size *= length
    return size


def _write(source: Source, plan: Plan, path: str, workers: int, speaks: bool) -> None:
    def remark(text: str) -> None:
        if speaks:
            print(f"mpidp: {text}", file=sys.stderr, flush=True)

    for text in source.remarks:
        remark(text)
    with Ticker("converting", sum(task_bytes(plan, task) for task in plan.tasks), speaks) as ticker:
        chunks = _encoded(source, plan, workers, ticker)
        write_file(path, plan.datasets, plan.layout.filters, chunks, source.texts, source.template, remark)


def _encoded(source: Source, plan: Plan, workers: int, ticker: Ticker) -> Iterator[EncodedChunk]:
    """Yield all chunks, task by task; so many tasks as there are threads are in work at a time, and one more."""
    tasks = iter(plan.tasks)
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
            ticker.add(task_bytes(plan, done))
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
    raw_bytes = sum(task_bytes(plan, task) for task in plan.tasks)
    sizes = f"{size_text(os.path.getsize(path))}, {size_text(raw_bytes)} decoded"
    return f"{path}: {'; '.join([*parts, str(plan.layout.filters), sizes])}"
