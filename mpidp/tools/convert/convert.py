"""A source, a target and a layout enter; an HDF5 file leaves, whole or not at all. Behind `mpidp data convert`.

Beside the target lie, until it is complete: TARGET.part and TARGET.part.jsonl, what has been encoded (convert_log.py);
TARGET.part.d, what a source had to unpack; and TARGET.part.h5, the file while its chunks are put together.
"""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from mpidp.errors import ConfigError, DataError
from mpidp.hdf5.files.file import open_file
from mpidp.hdf5.write.write import write_file
from mpidp.tools.convert.log import PartLog
from mpidp.tools.convert.plan import Layout, Plan, Task, make_plan
from mpidp.tools.convert.source import Source
from mpidp.tools.convert.workers import encode_all
from mpidp.tools.table import size_text
from mpidp.tools.ticker import Ticker
from mpidp.world.flush import flush_folder

MakeSource = Callable[[Path], Source]


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

    After a kill the same call goes on where it was. A target that exists is kept until its successor is complete.

    Args:
        make_source: opens the source; it may unpack files into the folder that it is given.
        target: path of the file to write.
        layout: chunks, filters, order.
        workers: processes that read and encode; 0 for one a core that this process may use.
        memory_bytes: how much all workers together may hold; more only where a single chunk needs it.
        overwrite: whether a file of that name may be replaced.
        speaks: whether to tell of progress on the standard error.

    Raises:
        ConfigError: the target exists, or options that do not fit the source.
        DataError: a source that cannot be read, a target that cannot be written, or the part of another conversion.
    """
    path = _checked_target(target, overwrite)
    scratch = Path(f"{path}.part.d")
    workers = workers or len(os.sched_getaffinity(0))
    log = PartLog(path)  # before anything is unpacked: two processes would spoil each other's files
    try:
        source = make_source(scratch)
        plan = make_plan(source, layout, memory_bytes, workers)
        log.begin({**source.identity(), **plan.identity()}, [group.task_rows for group in plan.groups])
        plan = plan.with_task_rows(log.task_rows)
        _encode(source, plan, log, workers, speaks)
        _publish(source, plan, log, path, overwrite)
    finally:
        log.close()
    log.remove()
    shutil.rmtree(scratch, ignore_errors=True)
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


def _encode(source: Source, plan: Plan, log: PartLog, workers: int, speaks: bool) -> None:
    todo = [task for task in plan.tasks if task.number not in log.done]
    remarks = [*source.remarks, *log.remarks]
    if log.done:
        remarks.append(f"going on where an earlier start was: {len(log.done)} of {len(plan.tasks)} parts are done")
    if speaks:
        for remark in remarks:
            print(f"mpidp: {remark}", file=sys.stderr, flush=True)
    with Ticker("converting", sum(task_bytes(plan, task) for task in todo), speaks) as ticker:
        for task, chunks in encode_all(source, plan, todo, workers):
            log.add(task.number, chunks)
            ticker.add(task_bytes(plan, task))


def _publish(source: Source, plan: Plan, log: PartLog, path: str, overwrite: bool) -> None:
    """Put the chunks together in a file of another name, and rename it when it is on the disk."""
    assembled = f"{path}.part.h5"
    write_file(assembled, plan.datasets, plan.layout.filters, log.chunks(), source.texts, source.template)
    if not overwrite:
        _check_absent(path)  # once more: it took a while
    os.replace(assembled, path)
    flush_folder(Path(path).parent)


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
        f"{new.name} {' x '.join(map(str, new.shape))} {new.dtype} in chunks of {new.chunk_rows}"
        for new in plan.datasets
    ]
    raw_bytes = sum(task_bytes(plan, task) for task in plan.tasks)
    sizes = f"{size_text(os.path.getsize(path))}, {size_text(raw_bytes)} decoded"
    return f"{path}: {'; '.join(parts)}; {plan.layout.filters}; {sizes}"
