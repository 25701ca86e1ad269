"""The sources of a loader's rows, one for each mode.

Where rows come from never changes which samples form a step. A source serves one stretch of steps at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from mpidp.errors import DataError
from mpidp.hdf5.dataset import Rows
from mpidp.hdf5.memory_budget import Resources
from mpidp.hdf5.modes.stream import Assembled, assemble, tensors_of
from mpidp.hdf5.order.keyed import IntArray
from mpidp.hdf5.order.order import Order, Share, step_rows
from mpidp.hdf5.prefetch import BatchRing, Prefetcher
from mpidp.hdf5.read import RowReader, Selection

if TYPE_CHECKING:
    from mpidp.hdf5.modes.stage import Staging
    from mpidp.world.world import World


INLINE_BYTES = 2**20

Mode = Literal["stream", "node", "store", "stage"]


class Stretch(Protocol):
    """The steps of a rank from some position on, without end."""

    def __next__(self) -> Assembled:
        """Return the next step."""

    def close(self) -> None:
        """End it; what was read ahead is dropped."""


def _by_thread_if_large(made: Callable[[], Generator[Assembled, None, None]], ring: BatchRing, depth: int) -> Stretch:
    """Return the steps of `made`, put together `depth` steps ahead by a thread where batches are large.

    Handing a small batch from thread to thread costs more than making it of rows that are decoded already.
    """
    return made() if ring.batch_bytes <= INLINE_BYTES else Prefetcher(made, depth)


class FileSource:
    """Rows read from the files, decoded ahead by threads."""

    def __init__(self, selection: Selection, ring: BatchRing, depth: int, line: str) -> None:
        self.line = line
        self._selection = selection
        self.ring = ring
        self._depth = depth

    def steps(self, order: Order, share: Share, use: Resources) -> Stretch:
        """Return the steps of `share`, without end."""
        made = partial(assemble, self._selection, order, share, self.ring, use)
        return _by_thread_if_large(made, self.ring, self._depth)

    def renew(self, ring: BatchRing) -> None:
        """Go on with other shares: ranks have died."""
        self.ring = ring

    def close(self) -> None:
        """Nothing is held."""


class Memory(Protocol):
    """All selected rows in memory somewhere; see `node_memory.py` and `spread_memory.py`."""

    @property
    def line(self) -> str:
        """What is held, in one line."""

    def start(self, numbers: IntArray) -> None:
        """Begin to fetch rows."""

    def finish(self, out: Rows | None) -> None:
        """Copy the rows of the last `start` to `out`, or drop them if it is None."""

    def abandon(self) -> None:
        """A rank has died: forget what was asked for, and what needs all ranks. Not collective."""

    def close(self) -> None:
        """Give the memory back."""


class MemorySource:
    """Rows fetched from memory, by any thread up to `depth` steps ahead, or with 0 by the one that takes the steps.

    In the latter case the rows of the next step are asked for before this one is handed out, so that they may
    travel while it is computed.
    """

    def __init__(self, memory: Memory, selection: Selection, ring: BatchRing, depth: int) -> None:
        self._memory = memory
        self._fields = selection.dataset.fields
        self.ring = ring
        self._depth = depth
        self._asked = False

    @property
    def line(self) -> str:
        """What is held, in one line."""
        return self._memory.line

    def steps(self, order: Order, share: Share, use: Resources) -> Stretch:
        """Return the steps of `share`, without end."""
        made = partial(self._fetched, order, share, self._depth == 0)
        return made() if self._depth == 0 else _by_thread_if_large(made, self.ring, self._depth)

    def renew(self, ring: BatchRing) -> None:
        """Go on with other shares: ranks have died. Rows spread over all ranks are lost then."""
        self.ring = ring
        self._asked = False
        self._memory.abandon()

    def close(self) -> None:
        """Give the memory back. Collective where it is shared."""
        self._memory.close()

    def _fetched(self, order: Order, share: Share, ahead: bool) -> Generator[Assembled, None, None]:
        if self._asked:
            # For a stretch that was left. Not when it was left: a collector may do that, in any thread.
            self._memory.finish(None)
            self._asked = False
        wanted = step_rows(order, share)
        step, numbers = next(wanted)
        self._ask(numbers)
        for following, following_numbers in wanted:
            rows = self.ring.take(len(numbers))
            self._memory.finish(rows)
            self._asked = False
            if ahead:
                self._ask(following_numbers)
            yield Assembled(step, tensors_of(rows, self._fields), rows.numbers)
            if not ahead:
                self._ask(following_numbers)
            step, numbers = following, following_numbers

    def _ask(self, numbers: IntArray) -> None:
        self._memory.start(numbers)
        self._asked = True


class Source(Protocol):
    """Where rows come from; batches lie in the memory of `ring`."""

    ring: BatchRing

    @property
    def line(self) -> str:
        """What it does, in one line."""

    def steps(self, order: Order, share: Share, use: Resources) -> Stretch:
        """Return the steps of `share`, without end. What was returned before must have been closed."""

    def renew(self, ring: BatchRing) -> None:
        """Go on with other shares and memory for batches: ranks have died. Not collective."""

    def close(self) -> None:
        """Give back memory and files. Collective where memory is shared."""


class StagedSource(FileSource):
    """Rows read from copies of the files on this node."""

    def __init__(self, staging: Staging, selection: Selection, ring: BatchRing, depth: int) -> None:
        staged = replace(selection, dataset=selection.dataset.moved(staging.paths))
        super().__init__(staged, ring, depth, staging.line)
        self._staging = staging

    def close(self) -> None:
        """Say that this process needs the copies no more."""
        self._staging.close()


def check_mode(mode: Mode) -> None:
    """Raise `DataError` unless there is such a mode."""
    if mode not in get_args(Mode):
        raise DataError(f'mode is {mode!r}; give "stream", "node", "store" or "stage"')


def open_source(
    mode: Mode,
    selection: Selection,
    world: World | None,
    ring: BatchRing,
    depth: int,
    threads: int,
    stage_folder: str | Path | None,
) -> Source:
    """Return the source for a mode. Collective; in modes other than "stream" it reads or copies all data."""
    if mode == "stream":
        return FileSource(selection, ring, depth, "read from the files as they are needed")
    # Importing these starts MPI, which planning a run on a login node must not.
    if mode == "stage":
        from mpidp.hdf5.modes.stage import Staging

        return StagedSource(Staging(selection.dataset.paths, world, stage_folder), selection, ring, depth)
    from mpidp.hdf5.modes.node import Contents, NodeMemory
    from mpidp.hdf5.modes.store import SpreadMemory

    contents = Contents.of(selection)
    with closing(RowReader(selection)) as reader:
        if mode == "node":
            return MemorySource(NodeMemory(contents, reader.read, world, threads), selection, ring, depth)
        return MemorySource(SpreadMemory(contents, reader.read, world, threads), selection, ring, 0)
