"""Enters: rows of equal size in the memory of all ranks, and row numbers. Leaves: those rows, in this rank's memory.

They come by MPI's one-sided gets, or by messages where a test at start, by value, did not find gets trustworthy.
MPI is called by the thread that calls these methods, and by no other.
"""

from typing import Literal, get_args

import numpy as np

from mpidp.world import communicators
from mpidp.world.all_to_all import AllToAll
from mpidp.world.mpi import MPI
from mpidp.world.one_sided import OneSided, Window, make_window
from mpidp.world.wanted import ByteArray, IntArray, Transport, Wanted

Way = Literal["auto", "one-sided", "all-to-all"]

_TEST_ROWS = 64
_TEST_BYTES = 16 * 2**20


class RemoteRows:
    """Rows over all ranks, numbered from rank 0's first to the last rank's last. Making one is collective.

    First fill `segment`, then call `publish` (collective), then fetch; rows must not change afterwards. Fetching is
    collective if `way` is "all-to-all": every rank then calls `start` and `finish` equally often, also for no rows.

    Attributes:
        segment: this rank's rows, uint8 (rows_per_rank[rank], row_bytes).
        way: "local" (one rank), "one-sided" or "all-to-all"; known after `publish`, the same on all ranks.
        reason: why, in a few words.

    Args:
        comm: the ranks; it is duplicated.
        rows_per_rank: int64, the same on all ranks; some may be 0.
        row_bytes: size of a row, at least 1.
        way: "auto" tests one-sided gets; the others settle it.
    """

    def __init__(self, comm: MPI.Intracomm, rows_per_rank: IntArray, row_bytes: int, way: Way = "auto") -> None:
        assert len(rows_per_rank) == comm.size and row_bytes >= 1 and way in get_args(Way)
        self._comm = comm.Dup()
        self._ends = np.cumsum(rows_per_rank, dtype=np.int64)
        self._starts = self._ends - rows_per_rank
        self._row_bytes = row_bytes
        self._wish: Way = way
        num_rows = int(rows_per_rank[comm.rank])
        self._window: Window | None = None
        problem = "it was asked for" if way == "all-to-all" else ""
        if communicators.is_elastic():  # ranks may wait for ever for one that died while a window was made
            way, problem = "all-to-all", "windows do not survive the death of a rank"
        if comm.size > 1 and way != "all-to-all":
            self._window, problem = make_window(self._comm, num_rows * row_bytes)
        memory = np.empty(num_rows * row_bytes, np.uint8) if self._window is None else self._window.memory
        self.segment: ByteArray = memory[: num_rows * row_bytes].reshape(num_rows, row_bytes)
        self._messages = AllToAll(self._comm, self.segment)
        self._transport: Transport = self._messages
        self.way, self.reason = "all-to-all", problem
        self._sorting = np.empty((0, row_bytes), np.uint8)
        self._open: tuple[IntArray, ByteArray, ByteArray] | None = None

    @property
    def num_rows(self) -> int:
        """Rows of all ranks."""
        return int(self._ends[-1])

    def publish(self) -> None:
        """Make what was stored in `segment` visible to all ranks, and choose the way. Collective."""
        if self._comm.size == 1:
            self.way, self.reason = "local", "one rank holds all"
            return
        if self._window is None:
            return
        self._window.synchronize()
        one_sided = OneSided(self._window, self._row_bytes)
        if self._wish == "one-sided":
            self._transport, self.way, self.reason = one_sided, "one-sided", "it was asked for"
            return
        problem = self._agreed(self._window.doubt()) or self._agreed(self._test(one_sided))
        if problem:
            self.reason = problem
        else:
            self._transport, self.way = one_sided, "one-sided"
            self.reason = "a test fetched the right rows on every rank"
            if not self._window.shared:
                self.reason += "; gets wait for their target's next call of MPI, as /dev/shm is too small for the rows"

    def fetch(self, rows: IntArray, out: ByteArray) -> None:
        """Copy rows (int64 numbers over all ranks, in any order) to `out`, uint8 (len(rows), row_bytes)."""
        self.start(rows, out)
        self.finish()

    def start(self, rows: IntArray, out: ByteArray) -> None:
        """Begin a fetch, which `finish` ends: rows may travel in between. One fetch at a time."""
        assert self._open is None, "a fetch was started before the last one was finished"
        assert out.shape == (len(rows), self._row_bytes) and out.dtype == np.uint8 and out.flags.c_contiguous
        rows = np.asarray(rows, dtype=np.int64)
        ascending = bool((rows[1:] >= rows[:-1]).all())
        order = np.arange(len(rows)) if ascending else np.argsort(rows, kind="stable")
        into = out if ascending else self._sorting_room(len(rows))
        self._begin(self._transport, rows if ascending else rows[order], into)
        self._open = order, into, out

    def finish(self) -> None:
        """Return when the rows of the last `start` are in its `out`."""
        assert self._open is not None, "there is no fetch to finish"
        order, into, out = self._open
        self._open = None
        self._transport.finish()
        if into is not out:
            out[order] = into

    def abandon(self) -> None:
        """Let go of the rows when a rank has died and the communicator was revoked. Not collective."""
        self._messages.abandon()
        self._open = None

    def free(self) -> None:
        """Give the memory back; `segment` must not be used any more. Collective."""
        if self._open is not None:
            self.finish()
        # Nothing here may point into the window's memory any more.
        self.segment = np.empty((0, self._row_bytes), np.uint8)
        self._transport = self._messages = AllToAll(self._comm, self.segment)
        if self._window is not None:
            self._window.free()
        self._comm.Free()

    def _begin(self, transport: Transport, rows: IntArray, into: ByteArray) -> None:
        """Copy this rank's own rows and ask for the others; `rows` ascend."""
        assert not len(rows) or (rows[0] >= 0 and rows[-1] < self.num_rows), "a row outside the data"
        ranks = np.searchsorted(self._ends, rows, side="right").astype(np.int64, copy=False)
        wanted = Wanted(ranks, rows - self._starts[ranks])
        begin, end = np.searchsorted(ranks, [self._comm.rank, self._comm.rank + 1])
        # With mode="raise" NumPy would go through a buffer of its own.
        np.take(self.segment, wanted.rows[begin:end], axis=0, out=into[begin:end], mode="clip")
        if self._comm.size > 1:
            transport.start(wanted, into)

    def _sorting_room(self, count: int) -> ByteArray:
        if len(self._sorting) < count:
            self._sorting = np.empty((count, self._row_bytes), np.uint8)
        return self._sorting[:count]

    def _agreed(self, problem: str) -> str:
        """Return the problem of the lowest rank that has one, or "". Collective."""
        return next((found for found in self._comm.allgather(problem) if found), "")

    def _test(self, one_sided: Transport) -> str:
        """Return what is wrong with rows fetched one-sidedly, or "". Collective."""
        count = min(_TEST_ROWS, max(1, _TEST_BYTES // self._row_bytes)) if self.num_rows else 0
        generator = np.random.default_rng(self._comm.rank)
        edges = [0, self.num_rows - 1, *(self._starts[self._ends > self._starts][1:3])]
        rows = np.sort([*edges, *generator.integers(0, max(1, self.num_rows), count)][-count:] if count else [])
        rows = rows.astype(np.int64)
        expected = np.empty((len(rows), self._row_bytes), np.uint8)
        self._begin(self._messages, rows, expected)
        self._messages.finish()
        found = ~expected  # so that nothing written at all is noticed too
        try:
            self._begin(one_sided, rows, found)
            one_sided.finish()
        except MPI.Exception as error:
            return f"one-sided gets failed on rank {self._comm.rank}: {error}"
        wrong = int((found != expected).any(axis=1).sum())
        return f"{wrong} of {len(rows)} rows fetched one-sidedly on rank {self._comm.rank} were wrong" if wrong else ""
