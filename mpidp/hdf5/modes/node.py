"""The mode `node`: one decoded copy of all rows in the memory of each node, made and read by its ranks."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mpidp.errors import DataError
from mpidp.hdf5.dataset import Rows
from mpidp.hdf5.order.keyed import IntArray
from mpidp.hdf5.order.plan import Piece
from mpidp.hdf5.read import Selection
from mpidp.world.shared_memory import SharedWindow
from mpidp.world.system import available_memory

if TYPE_CHECKING:
    from mpidp.hdf5.field import Field
    from mpidp.world.world import World


# Fills `Rows`, which has room for just the rows of the piece; `RowReader.read` does it.
Read = Callable[[Piece, Rows], None]
Records = npt.NDArray[np.void]


@dataclass(frozen=True, eq=False)
class Contents:
    """The selected rows of a data set, numbered from 0.

    fields: what a row has. chunk_rows: selected rows of each chunk, int64. all_rows: whether these are all rows
    of the data set, so that a row's number here is its number over all files.
    """

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

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows in memory."""
        return self.num_rows * self.record.itemsize

    def share(self, part: int, parts: int) -> tuple[int, int]:
        """Return the rows [start, stop) of one of `parts` shares, whose sizes differ by at most one."""
        return self.num_rows * part // parts, self.num_rows * (part + 1) // parts

    def pieces(self, start: int, stop: int) -> Iterator[tuple[Piece, int]]:
        """Yield the pieces that rows [start, stop) are, each with how many rows come before it."""
        edges = self._edges
        chunk = int(np.searchsorted(edges, start, side="right")) - 1
        done = start
        while done < stop:
            begin, end = int(edges[chunk]), min(int(edges[chunk + 1]), stop)
            if end > done:
                yield Piece(chunk, done - begin, end - begin), done - start
                done = end
            chunk += 1

    def fill(self, read: Read, start: int, stop: int, records: Records, threads: int = 1) -> None:
        """Read rows [start, stop) into `records`; with more than one of `threads`, `read` is called in all of them.

        Raises what `read` raises.
        """

        def load(piece: Piece, at: int) -> None:
            count = piece.stop - piece.start
            rows = Rows.empty(self.fields, count)
            read(piece, rows)
            self._pack(rows, records[at : at + count])

        assert len(records) == stop - start
        if threads == 1:
            for piece, at in self.pieces(start, stop):
                load(piece, at)
            return
        with ThreadPoolExecutor(threads, "mpidp-fill") as pool:
            jobs = [pool.submit(load, piece, at) for piece, at in self.pieces(start, stop)]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def unpack(self, records: Records, out: Rows, where: IntArray | slice) -> None:
        """Copy the fields of `records` to the places `where` of `out`; numbers only if they are in the records."""
        for place, field in enumerate(self.fields):
            out.fields[field.name][where] = records[str(place)]
        if not self.all_rows:
            out.numbers[where] = records["number"]

    def _pack(self, rows: Rows, records: Records) -> None:
        for place, field in enumerate(self.fields):
            records[str(place)] = rows.fields[field.name]
        if not self.all_rows:
            records["number"] = rows.numbers

    @cached_property
    def _edges(self) -> IntArray:
        return np.concatenate(([0], np.cumsum(self.chunk_rows, dtype=np.int64)))


# Model, optimizer, batches and libraries need some too.
LARGEST_SHARE = 0.9


def check_room(world: World | None, mode: str, num_bytes: int) -> None:
    """Raise `DataError` on every rank if some node cannot hold what its ranks want. Collective.

    Args:
        world: the ranks; None is this process alone.
        mode: the loader's, for the message: "node" or "store".
        num_bytes: what this rank wants; ranks of a node may want different amounts.
    """
    if world is None:
        _check(mode, num_bytes, 1)
        return
    needed = world.sum_on_node(num_bytes)
    with world.raise_on_all_ranks("making room for the data"):
        _check(mode, needed, world.num_nodes)


def _check(mode: str, needed: int, num_nodes: int) -> None:
    left = available_memory()
    usable = None if left is None else int(LARGEST_SHARE * left)
    if left is not None and usable is not None and needed > usable:
        raise DataError(
            f'mode="{mode}" holds the decoded data in memory: {needed:,} bytes on {socket.gethostname()}, where memory '
            f"has {left:,} bytes left, of which the data may take {usable:,}. {_advice(mode, num_nodes)}"
        )


def _advice(mode: str, num_nodes: int) -> str:
    if mode == "node" and num_nodes > 1:
        return 'Take mode="store", which spreads the data over the nodes, or mode="stream"; or ask for more memory'
    return 'Take mode="stream"; or ask for more memory (sbatch --mem=0), or for more nodes with mode="store"'


class NodeMemory:
    """All rows, once a node. Making one is collective.

    Fetching is not collective, calls no MPI, and may happen in any thread.

    contents: which rows. read: fills a piece (see `Contents.fill`). world: the ranks; None is this process alone.
    threads: how many call `read` at a time.

    Raises `DataError` on every rank when a node has no room, and what `read` raises on one of them.
    """

    def __init__(self, contents: Contents, read: Read, world: World | None = None, threads: int = 1) -> None:
        self._contents = contents
        self._ranks, self._rank = (1, 0) if world is None else (world.local_size, world.local_rank)
        self._window: SharedWindow | None = None
        self._pending: IntArray | None = None
        start, stop = contents.share(self._rank, self._ranks)
        largest = -(-contents.num_rows // self._ranks) * contents.record.itemsize
        check_room(world, "node", largest)
        self._starts = np.array([contents.share(rank, self._ranks)[0] for rank in range(self._ranks)], dtype=np.int64)
        self._segments: list[Records] = []
        try:
            if world is not None and world.size > 1:
                self._window = _share(world, largest)
            self._segments = self._views()
            with nullcontext() if world is None else world.raise_on_all_ranks("decoding the data into memory"):
                contents.fill(read, start, stop, self._segments[self._rank], threads)
        except Exception:  # on every rank, so that all of them come to the collective end
            self.close()
            raise
        if self._window is not None:
            self._window.synchronize()

    @property
    def num_bytes(self) -> int:
        """Bytes that this node holds."""
        return sum(segment.nbytes for segment in self._segments)

    @property
    def line(self) -> str:
        """What is held, in one line."""
        return f"{self.num_bytes / 2**20:,.1f} MiB of decoded rows held once a node, read by its {self._ranks} rank(s)"

    def rows(self, numbers: IntArray, out: Rows) -> None:
        """Copy the values of rows `numbers` (int64, in any order) to `out`, which has room for just them."""
        self.start(numbers)
        self.finish(out)

    def start(self, numbers: IntArray) -> None:
        """Say which rows `finish` will want; for memory on the node there is nothing to begin."""
        assert self._pending is None, "rows were asked for before the last ones were taken"
        self._pending = np.asarray(numbers, dtype=np.int64)

    def finish(self, out: Rows | None) -> None:
        """Copy the rows of the last `start` to `out`, or drop them if it is None."""
        numbers, self._pending = self._pending, None
        assert numbers is not None, "no rows were asked for"
        if out is None:
            return
        assert not len(numbers) or (numbers.min() >= 0 and numbers.max() < self._contents.num_rows)
        ranks = np.searchsorted(self._starts, numbers, side="right") - 1
        for rank in np.unique(ranks).tolist():
            where = np.flatnonzero(ranks == rank)
            self._copy(self._segments[rank], numbers[where] - self._starts[rank], out, where)
        if self._contents.all_rows:
            out.numbers[:] = numbers

    def abandon(self) -> None:
        """Forget what was asked for. The rows of a rank that died stay in the node's memory. Not collective."""
        self._pending = None

    def close(self) -> None:
        """Give the memory back."""
        self._segments, self._pending, self._window = [], None, None

    def _copy(self, segment: Records, rows: IntArray, out: Rows, where: IntArray) -> None:
        for place, field in enumerate(self._contents.fields):
            out.fields[field.name][where] = segment[str(place)][rows]
        if not self._contents.all_rows:
            out.numbers[where] = segment["number"][rows]

    def _views(self) -> list[Records]:
        """Return the rows that each local rank decodes."""
        if self._window is None:
            return [np.empty(self._contents.num_rows, self._contents.record)]
        views = []
        for rank, segment in enumerate(self._window.segments):
            start, stop = self._contents.share(rank, self._ranks)
            views.append(segment.numpy()[: (stop - start) * self._contents.record.itemsize].view(self._contents.record))
        return views


def _share(world: World, num_bytes: int) -> SharedWindow | None:
    """Return memory that the ranks of a node share, or None for a rank that is alone there. Collective.

    Raises `DataError` on all ranks when those of one node cannot share memory.
    """
    window: SharedWindow | None = None
    error: OSError | None = None
    # All ranks of a node fail together, but those of other nodes do not know.
    try:
        window = SharedWindow(world.node_comm, num_bytes) if world.local_size > 1 else None
    except OSError as caught:
        error = caught
    failure = error and f"{world.host}: the ranks of a node cannot share {num_bytes:,} bytes ({error})"
    failures = [found for found in world.comm.allgather(failure) if found]
    with world.raise_on_all_ranks("sharing memory"):
        if failures:
            raise DataError(f'mode="node": {failures[0]}; take mode="store" or mode="stream"')
    return window
