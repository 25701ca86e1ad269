"""The modes `node` and `store`: all rows decoded once and held in memory, once a node or once over all ranks.

They are held as records of bytes. A record is one row, with all its fields one after the other, so that one copy
fetches a sample.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mpidp.errors import DataError
from mpidp.hdf5.dataset import Rows
from mpidp.hdf5.memory_budget import Resources
from mpidp.hdf5.modes.stream import Assembled, tensors_of
from mpidp.hdf5.order import Order, Share, step_rows
from mpidp.hdf5.plan import IntArray, Piece
from mpidp.hdf5.prefetch import BatchRing
from mpidp.hdf5.read import Selection
from mpidp.world.rank_memory import ByteArray, RemoteRows, SharedWindow
from mpidp.world.system import available_memory

if TYPE_CHECKING:
    from mpidp.hdf5.field import Field
    from mpidp.world.world import World

# Fills `Rows`, which has room for just the rows of the piece, in any thread; `RowReader.read` does it.
Read = Callable[[Piece, Rows], None]
Records = npt.NDArray[np.void]

# Model, optimizer, batches and libraries need some memory too.
LARGEST_SHARE = 0.9


@dataclass(frozen=True, eq=False)
class Contents:
    """The selected rows of a data set, numbered from 0; with `all_rows` that is a row's number over all files, too."""

    fields: tuple[Field, ...]
    chunk_rows: IntArray
    all_rows: bool

    @classmethod
    def of(cls, selection: Selection) -> Contents:
        """Return the rows of a selection."""
        return cls(selection.dataset.fields, selection.chunk_rows, selection.split is None)

    @cached_property
    def num_rows(self) -> int:
        """The number of rows."""
        return int(self.chunk_rows.sum())

    @cached_property
    def record(self) -> np.dtype[Any]:
        """The dtype of a record, aligned; fields go by their place, as their names are the user's."""
        members: list[Any] = [(str(place), field.dtype, field.shape) for place, field in enumerate(self.fields)]
        return np.dtype(members if self.all_rows else [*members, ("number", np.int64)], align=True)

    def share(self, part: int, parts: int) -> tuple[int, int]:
        """Return the rows [start, stop) of one of `parts` shares, whose sizes differ by at most one."""
        return self.num_rows * part // parts, self.num_rows * (part + 1) // parts

    def pieces(self, start: int, stop: int) -> Iterator[tuple[Piece, int]]:
        """Yield the pieces that rows [start, stop) are, each with how many rows come before it."""
        edges = np.concatenate(([0], np.cumsum(self.chunk_rows, dtype=np.int64)))
        chunk = int(np.searchsorted(edges, start, side="right")) - 1
        done = start
        while done < stop:
            begin, end = int(edges[chunk]), min(int(edges[chunk + 1]), stop)
            if end > done:
                yield Piece(chunk, done - begin, end - begin), done - start
                done = end
            chunk += 1

    def fill(self, read: Read, start: int, stop: int, records: Records, threads: int = 1) -> None:
        """Read rows [start, stop) into `records`, `threads` pieces at a time. Raises what `read` raises."""

        def load(piece: Piece, at: int) -> None:
            count = piece.stop - piece.start
            rows = Rows.empty(self.fields, count)
            read(piece, rows)
            for place, field in enumerate(self.fields):
                records[str(place)][at : at + count] = rows.fields[field.name]
            if not self.all_rows:
                records["number"][at : at + count] = rows.numbers

        assert len(records) == stop - start
        with ThreadPoolExecutor(threads, "mpidp-fill") as pool:
            jobs = [pool.submit(load, piece, at) for piece, at in self.pieces(start, stop)]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


class HeldRows(ABC):
    """All selected rows in memory somewhere: a source of steps. One fetch of rows may be under way at a time.

    With `may_run_ahead`, any thread may make steps ahead of the one that is computed. Otherwise the thread that takes
    them makes them, and asks for rows of the next step before it hands this one out, so that they travel meanwhile.
    """

    may_run_ahead = True

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._is_asked = False

    @property
    @abstractmethod
    def line(self) -> str:
        """What is held, in one line; the same on every rank of a node."""

    @abstractmethod
    def start(self, numbers: IntArray) -> None:
        """Begin to fetch rows `numbers` (int64, in any order)."""

    @abstractmethod
    def finish(self, out: Rows | None) -> None:
        """Copy the rows of the last `start` to `out`, which has room for just them, or drop them if it is None."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back. Not collective."""

    def steps(self, order: Order, share: Share, ring: BatchRing, use: Resources) -> Generator[Assembled, None, None]:
        """Yield the steps of `share`, without end. What was yielded from before must have been closed."""
        if self._is_asked:
            # For steps that were left. Not when they were left: a collector may do that, in any thread.
            self.finish(None)
            self._is_asked = False
        wanted = step_rows(order, share)
        step, numbers = next(wanted)
        self._ask(numbers)
        for following, following_numbers in wanted:
            rows = ring.take(len(numbers))
            self.finish(rows)
            self._is_asked = False
            if not self.may_run_ahead:
                self._ask(following_numbers)
            yield Assembled(step, tensors_of(rows, self._contents.fields), rows.numbers)
            if self.may_run_ahead:
                self._ask(following_numbers)
            step, numbers = following, following_numbers

    def _ask(self, numbers: IntArray) -> None:
        self.start(numbers)
        self._is_asked = True


def check_room(world: World, mode: str, num_bytes: int) -> None:
    """Raise `DataError` on every rank if a node cannot hold the `num_bytes` of each of its ranks. Collective."""
    needed = world.sum_on_node(num_bytes)
    with world.raise_on_all_ranks("making room for the data"):
        left = available_memory()
        if left is not None and needed > (usable := int(LARGEST_SHARE * left)):
            raise DataError(
                f'mode="{mode}" holds the decoded data in memory: {needed:,} bytes on {socket.gethostname()}, where '
                f"memory has {left:,} bytes left, of which the data may take {usable:,}. "
                f"{_advice(mode, world.num_nodes)}"
            )


def _advice(mode: str, num_nodes: int) -> str:
    if mode == "node" and num_nodes > 1:
        return 'Take mode="store", which spreads the data over the nodes, or mode="stream"; or ask for more memory'
    return 'Take mode="stream"; or ask for more memory (sbatch --mem=0), or for more nodes with mode="store"'


class NodeMemory(HeldRows):
    """All rows, once a node; each of its ranks decodes a share. Making one is collective; errors reach all ranks.

    Fetching is not collective, calls no MPI, and may happen in any thread. Messages name `mode`: "node", or "store" for
    one rank.
    """

    def __init__(self, contents: Contents, read: Read, world: World, threads: int = 1, mode: str = "node") -> None:
        super().__init__(contents)
        self._ranks = world.local_size
        shares = [contents.share(rank, self._ranks) for rank in range(self._ranks)]
        self._starts = np.array([start for start, _ in shares], dtype=np.int64)
        self._pending = np.empty(0, np.int64)
        largest = -(-contents.num_rows // self._ranks) * contents.record.itemsize
        check_room(world, mode, largest)
        window = _share(world, largest)
        if window is None:
            self._segments: list[Records] = [np.empty(contents.num_rows, contents.record)]
        else:
            num_bytes = [(stop - start) * contents.record.itemsize for start, stop in shares]
            views = zip(window.segments, num_bytes, strict=True)
            self._segments = [segment.numpy()[:count].view(contents.record) for segment, count in views]
        with world.raise_on_all_ranks("decoding the data into memory"):
            contents.fill(read, *shares[world.local_rank], self._segments[world.local_rank], threads)
        if window is not None:
            window.synchronize()

    @property
    def line(self) -> str:
        """What is held, in one line."""
        num_bytes = sum(segment.nbytes for segment in self._segments)
        return f"{num_bytes / 2**20:,.1f} MiB of decoded rows held once a node, read by its {self._ranks} rank(s)"

    def start(self, numbers: IntArray) -> None:
        """Say which rows `finish` will want; for memory on the node there is nothing to begin."""
        self._pending = np.asarray(numbers, dtype=np.int64)

    def finish(self, out: Rows | None) -> None:
        """Copy the rows of the last `start` to `out`, or drop them if it is None."""
        numbers = self._pending
        if out is None:
            return
        assert not len(numbers) or (numbers.min() >= 0 and numbers.max() < self._contents.num_rows)
        ranks = np.searchsorted(self._starts, numbers, side="right") - 1
        for rank in np.unique(ranks).tolist():
            where = np.flatnonzero(ranks == rank)
            segment, rows = self._segments[rank], numbers[where] - self._starts[rank]
            for place, field in enumerate(self._contents.fields):
                out.fields[field.name][where] = segment[str(place)][rows]
            if not self._contents.all_rows:
                out.numbers[where] = segment["number"][rows]
        if self._contents.all_rows:
            out.numbers[:] = numbers

    def close(self) -> None:
        """Give the memory back. Not collective: the node's is there until the last of its ranks has done so."""
        self._segments = []


def _share(world: World, num_bytes: int) -> SharedWindow | None:
    """Return memory that the ranks of a node share, or None for a rank that is alone there. Collective."""
    window: SharedWindow | None = None
    failure = ""
    # All ranks of a node fail together, but those of other nodes do not know.
    try:
        window = SharedWindow(world.node_comm, num_bytes) if world.local_size > 1 else None
    except OSError as error:
        failure = f"{world.host}: the ranks of a node cannot share {num_bytes:,} bytes ({error})"
    failures = [found for found in world.comm.allgather(failure) if found]
    if failures:
        with world.raise_on_all_ranks("sharing memory"):
            raise DataError(f'mode="node": {failures[0]}; take mode="store" or mode="stream"')
    return window


class SpreadMemory(HeldRows):
    """All rows, once over all ranks: each decodes and holds a run of them, and others fetch them by messages.

    Making one is collective, and so are `start` and `finish`, also for no rows. MPI is called by the thread that calls
    these methods, and by no other.
    """

    may_run_ahead = False

    def __init__(self, contents: Contents, read: Read, world: World, threads: int = 1) -> None:
        super().__init__(contents)
        shares = [contents.share(part, world.size) for part in range(world.size)]
        counts = np.array([stop - start for start, stop in shares], dtype=np.int64)
        row_bytes = contents.record.itemsize
        check_room(world, "store", int(counts[world.rank]) * row_bytes)
        self._remote = RemoteRows(world.comm, counts, row_bytes)
        with world.raise_on_all_ranks("decoding the data into memory"):
            contents.fill(read, *shares[world.rank], self._records(self._remote.segment), threads)
        self._received = np.empty((0, row_bytes), np.uint8)
        self._pending: tuple[IntArray, IntArray] | None = None

    @property
    def line(self) -> str:
        """What is held, in one line; the same on every rank."""
        num_bytes = self._contents.num_rows * self._contents.record.itemsize
        return f"{num_bytes / 2**20:,.1f} MiB of decoded rows held once over all ranks, fetched by messages"

    def start(self, numbers: IntArray) -> None:
        """Begin to fetch rows: they may travel until `finish` is called. Collective."""
        order = np.argsort(numbers, kind="stable")
        if len(self._received) < len(numbers):
            self._received = np.empty((len(numbers), self._contents.record.itemsize), np.uint8)
        self._remote.start(numbers[order], self._received[: len(numbers)])
        self._pending = numbers, order

    def finish(self, out: Rows | None) -> None:
        """Copy the rows of the last `start` to `out`, or drop them if it is None. Collective."""
        assert self._pending is not None, "no rows were asked for"
        (numbers, order), self._pending = self._pending, None
        self._remote.finish()
        if out is None:
            return
        records = self._records(self._received[: len(numbers)])
        for place, field in enumerate(self._contents.fields):
            out.fields[field.name][order] = records[str(place)]
        if self._contents.all_rows:
            out.numbers[:] = numbers
        else:
            out.numbers[order] = records["number"]

    def close(self) -> None:
        """Give the memory back. Not collective; ranks may have died meanwhile."""
        self._remote.close()

    def _records(self, memory: ByteArray) -> Records:
        records: Records = memory.reshape(-1).view(self._contents.record)
        return records
