"""The mode `stream`: rows read from the files ahead of their step, by threads that decode.

Steps are made in the prefetch thread and in a pool of threads that decode; nothing here calls MPI.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from mpidp.hdf5.dataset import Rows
from mpidp.hdf5.field import Field
from mpidp.hdf5.gather import GroupStore, RowGatherer, StreamGatherer
from mpidp.hdf5.memory_budget import Resources
from mpidp.hdf5.order import Order, Share, Step, step_rows, steps
from mpidp.hdf5.plan import IntArray, StreamPlan
from mpidp.hdf5.prefetch import BatchRing
from mpidp.hdf5.read import RowReader, Selection
from mpidp.world.status import status

_PART_BYTES = 2**20


@dataclass(frozen=True)
class Assembled:
    """A rank's samples of a step: tensors in host memory, row numbers over all files."""

    step: Step
    tensors: dict[str, Tensor]
    indices: IntArray


class FileRows:
    """Rows read from the files, or from copies of them, as they are needed: a source of steps.

    `line` says where they are read from, and `close` gives the files up.
    """

    may_run_ahead = True

    def __init__(self, selection: Selection, line: str, close: Callable[[], None] = lambda: None) -> None:
        self._selection = selection
        self.line = line
        self.close = close

    def steps(self, order: Order, share: Share, ring: BatchRing, use: Resources) -> Generator[Assembled, None, None]:
        """Yield the steps of `share`, without end: epoch follows epoch, so that the next is read ahead of its start."""
        make = _by_streams if order.shuffle == "streams" else _by_rows
        with (
            closing(RowReader(self._selection, use.cache_bytes)) as reader,
            ThreadPoolExecutor(use.threads, "mpidp-decode") as pool,
        ):
            try:
                for step, rows in make(reader, order, share, ring, use, pool):
                    yield Assembled(step, tensors_of(rows, self._selection.dataset.fields), rows.numbers)
            finally:
                pool.shutdown(wait=True, cancel_futures=True)


def _by_streams(
    reader: RowReader, order: Order, share: Share, ring: BatchRing, use: Resources, pool: Executor
) -> Iterator[tuple[Step, Rows]]:
    capacity = order.mixing_chunks * int(order.chunk_rows.max())
    store = GroupStore(reader, pool, use.held_groups, capacity)

    def begin(epoch: int, position: int) -> tuple[StreamPlan, StreamGatherer]:
        plan = order.plan(epoch)
        assert isinstance(plan, StreamPlan)
        return plan, StreamGatherer(plan, store, share.size, share.rank, position, order.end(position))

    plan, gatherer = begin(share.epoch, share.position)
    following: tuple[StreamPlan, StreamGatherer] | None = None
    epoch = share.epoch
    for step in steps(order, share):
        if step.epoch != epoch:
            gatherer.release()
            plan, gatherer = following or begin(step.epoch, 0)
            following, epoch = None, step.epoch
        if gatherer.start_ahead():
            following = following or begin(epoch + 1, 0)
            following[1].start_ahead()
        indices = plan.local_indices(step.start, share.size, share.rank)
        rows = ring.take(len(indices))
        gatherer.gather(indices, rows)
        yield step, rows


def _by_rows(
    reader: RowReader, order: Order, share: Share, ring: BatchRing, use: Resources, pool: Executor
) -> Iterator[tuple[Step, Rows]]:
    room = BatchRing(reader.selection.dataset.fields, int(order.chunk_rows.max()), use.threads, torch.device("cpu"))
    gatherer = RowGatherer(reader, use.kept_bytes, order.shuffle == "full", room.take)
    # All threads read a large batch together: it is there sooner, and fewer batches wait for memory at a time.
    most_parts = max(1, min(use.threads, ring.batch_bytes // _PART_BYTES))
    ahead: deque[tuple[Step, Rows, list[Future[None]]]] = deque()

    def gather(numbers: IntArray, places: IntArray, rows: Rows) -> None:
        with status.working("read rows"):
            gatherer.gather(numbers, places, rows)

    for step, numbers in step_rows(order, share):
        rows = ring.take(len(numbers))
        parts = gatherer.parts(numbers, most_parts)
        if gatherer.holds_all:  # a copy of some microseconds, which would cost more to hand to a thread
            while ahead:
                yield _finished(*ahead.popleft())
            gather(numbers, parts[0], rows)
            yield step, rows
            continue
        ahead.append((step, rows, [pool.submit(gather, numbers, places, rows) for places in parts]))
        if sum(len(futures) for _, _, futures in ahead) > use.threads:
            yield _finished(*ahead.popleft())


def _finished(step: Step, rows: Rows, parts: list[Future[None]]) -> tuple[Step, Rows]:
    for part in parts:
        part.result()
    return step, rows


def tensors_of(rows: Rows, fields: tuple[Field, ...]) -> dict[str, Tensor]:
    """Return tensors that share the memory of `rows`."""
    tensors = {name: torch.from_numpy(array) for name, array in rows.fields.items()}
    return tensors | {field.name: tensors[field.name].view(torch.bfloat16) for field in fields if field.is_bfloat16}
