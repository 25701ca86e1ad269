"""The mode `node`: one decoded copy of all rows in each node's shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpidp.errors import DataError
from mpidp.hdf5.dataset import Rows
from mpidp.hdf5.modes.memory import Contents, HeldRows, Read, Records, check_room
from mpidp.hdf5.order.keyed import IntArray
from mpidp.world.rank_memory import SharedWindow

if TYPE_CHECKING:
    from mpidp.world.world import World


class NodeMemory(HeldRows):
    """All rows, once a node; each of its ranks decodes a share. Making one is collective.

    Fetching is not collective, calls no MPI, and may happen in any thread.

    Args:
        contents: which rows.
        read: fills a piece.
        world: the ranks.
        threads: how many call `read` at a time.
        mode: for the message: "node", or "store" on one rank.

    Raises:
        DataError: on every rank: a node has no room, and what `read` raises on one of them.
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
    """Return memory that the ranks of a node share, or None for a rank that is alone there. Collective.

    Raises `DataError` on all ranks when those of one node cannot share memory.
    """
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
