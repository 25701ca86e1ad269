"""A source, a plan and tasks enter; encoded chunks leave, made by several processes.

Processes, and not threads: HDF5 does one thing at a time in a process, filters included. They are spawned, hold no
part of the parent, and end with it, also when it is killed.

Each worker answers through a pipe of its own. `concurrent.futures.ProcessPoolExecutor` has one pipe for all, which the
parent holds open as well: when a worker is killed in the middle of a large answer, it waits for the rest for ever.
"""

import os
import signal
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from mpidp.errors import DataError, MpidpError
from mpidp.hdf5.write.write import EncodedChunk, encode
from mpidp.tools.convert.plan import Plan, Task
from mpidp.tools.convert.source import Source

# So many tasks a worker are dealt out: one in work, one waiting.
AHEAD = 2
END_TIMEOUT_S = 5.0

Encoded = list[EncodedChunk]


@dataclass(frozen=True)
class _Failure:
    """Why a worker has no chunks."""

    error: BaseException


@dataclass
class _Worker:
    """A process, this end of its pipe, and the tasks that it was dealt and has not answered, in order."""

    process: BaseProcess
    pipe: Connection
    tasks: list[Task]

    def deal(self, task: Task) -> None:
        """Gives it a task: small, so that the pipe takes it at once, whatever the worker does."""
        self.tasks.append(task)
        self.pipe.send(task)


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
    team: list[_Worker] = []
    try:
        for _ in range(workers):
            team.append(_hire(source, plan))
        yield from _share_out(team, tasks)
    except (EOFError, ConnectionError) as error:
        raise DataError(
            "a worker process was killed or could not start, most likely for want of memory; give the same command "
            "again with fewer --workers or less --memory: what is done is kept"
        ) from error
    finally:
        _dismiss(team)


def _hire(source: Source, plan: Plan) -> _Worker:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, source, plan), daemon=True)
    process.start()
    theirs.close()  # only the worker holds that end now: when it dies, reading ends, be it in the midst of an answer
    return _Worker(process, ours, [])


def _share_out(team: Sequence[_Worker], tasks: Sequence[Task]) -> Iterator[tuple[Task, Encoded]]:
    remaining = iter(tasks)
    for worker in [*team] * AHEAD:
        if (task := next(remaining, None)) is not None:
            worker.deal(task)
    while busy := {worker.pipe: worker for worker in team if worker.tasks}:
        for pipe in wait(list(busy)):
            assert isinstance(pipe, Connection)
            worker = busy[pipe]
            answer = pipe.recv()
            if isinstance(answer, _Failure):
                raise answer.error
            done = worker.tasks.pop(0)
            if (task := next(remaining, None)) is not None:
                worker.deal(task)
            yield done, answer


def _dismiss(team: Sequence[_Worker]) -> None:
    """Ends all of them, whatever they do: what is not written is of no use to anybody."""
    for worker in team:
        worker.pipe.close()
        worker.process.kill()
    for worker in team:
        worker.process.join(END_TIMEOUT_S)


def _work(pipe: Connection, source: Source, plan: Plan) -> None:
    """A worker's life: an interrupt is for the parent, and a worker without a parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    while True:
        pipe.send(_answer(source, plan, pipe.recv()))


def _answer(source: Source, plan: Plan, task: Task) -> Encoded | _Failure:
    try:
        return encode_task(source, plan, task)
    except BaseException as error:
        if not isinstance(error, MpidpError):  # whose place in the code nobody needs to see
            error.add_note(f"in a worker process:\n{traceback.format_exc()}")
        return _Failure(error)
