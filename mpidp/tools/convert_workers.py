"""A source, a plan and tasks enter; encoded chunks leave, made by several processes.

Processes, and not threads: HDF5 does one thing at a time in a process, filters included. They are spawned, hold no
part of the parent, and end with it, also when it is killed.
"""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process

from mpidp.errors import DataError
from mpidp.hdf5.write.write import EncodedChunk, encode
from mpidp.tools.convert_plan import Plan, Task
from mpidp.tools.convert_source import Source

# So many tasks a worker are dealt out: one in work, one waiting.
AHEAD = 2

Encoded = list[EncodedChunk]


def encode_task(source: Source, plan: Plan, task: Task) -> Encoded:
    """Return the chunks of one task."""
    members = [(number, plan.datasets[number]) for number in task.group.fields]
    values = source.take([new.name for _, new in members], plan.rows(task))
    chunks: Encoded = []
    for number, new in members:
        encoded = encode(values.pop(new.name), new, plan.layout.filters)
        starts = range(task.start, task.stop, new.chunk_rows)
        chunks += [EncodedChunk(number, start, *chunk) for start, chunk in zip(starts, encoded, strict=True)]
    return chunks


def encode_all(source: Source, plan: Plan, tasks: Sequence[Task], workers: int) -> Iterator[tuple[Task, Encoded]]:
    """Yield every task with its chunks, as they are finished; in this process where one worker is enough.

    Raises `DataError` of the task that failed first, or when a worker was killed.
    """
    workers = min(workers, len(tasks))
    if workers <= 1:
        for task in tasks:
            yield task, encode_task(source, plan, task)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start, (source, plan))
    try:
        yield from _deal(pool, tasks, workers * AHEAD)
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process was killed or could not start, most likely for want of memory; give the same command "
            "again with fewer --workers or less --memory: what is done is kept"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _deal(pool: ProcessPoolExecutor, tasks: Sequence[Task], most: int) -> Iterator[tuple[Task, Encoded]]:
    waiting: dict[Future[Encoded], Task] = {}
    remaining = iter(tasks)
    while True:
        while len(waiting) < most and (task := next(remaining, None)) is not None:
            waiting[pool.submit(_run, task)] = task
        if not waiting:
            return
        for future in wait(waiting, return_when=FIRST_COMPLETED).done:
            yield waiting.pop(future), future.result()


_worker: tuple[Source, Plan] | None = None


def _start(source: Source, plan: Plan) -> None:
    """Prepare a worker: an interrupt is for the parent, and a worker without a parent ends."""
    global _worker
    _worker = (source, plan)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _run(task: Task) -> Encoded:
    assert _worker is not None
    return encode_task(*_worker, task)
