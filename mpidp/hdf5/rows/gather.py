"""Enters: the rows of a step, in any order. Leaves: their values.

This is for rows as they lie in the file and for any permutation; `lane_gather.py` is for rows in lanes.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np

from mpidp.hdf5.decode.cache import Cache
from mpidp.hdf5.files.dataset import Rows
from mpidp.hdf5.order.keyed import IntArray
from mpidp.hdf5.order.plan import Piece
from mpidp.hdf5.rows.pieces import PieceReader


class RowGatherer:
    """Reads the rows of a step, in any order; for any number of threads.

    Chunks of which parts are needed are decoded whole and kept while there is room, up to `most_bytes`; with
    `keep_all`, which is for orders that come back to every chunk, all of them in one block if it is so large.
    Where nothing is encoded, just the rows that are needed are read. `room` gives memory for the rows of a chunk.
    """

    def __init__(self, reader: PieceReader, most_bytes: int, keep_all: bool, room: Callable[[int], Rows]) -> None:
        self._reader = reader
        self._room = room
        self._edges = np.concatenate(([0], np.cumsum(reader.selection.chunk_rows)))
        self._chunks: Cache[int, Rows] = Cache(most_bytes, lambda rows: rows.num_bytes)
        num_rows = int(self._edges[-1])
        fits = num_rows * (reader.selection.dataset.row_bytes + 8) <= most_bytes
        self._all = reader.empty(num_rows) if keep_all and fits else None
        self._is_there = np.zeros(len(self._edges) - 1, dtype=np.bool_)

    def parts(self, rows: IntArray, most: int) -> list[IntArray]:
        """Return the places of the selected `rows` in up to `most` parts, for a thread each; none cuts a chunk."""
        if self._all is not None or most == 1 or not len(rows):
            return [np.arange(len(rows))]
        order, _, cuts = self._by_chunk(rows)
        edges = [int(cuts[(len(cuts) - 1) * part // most]) for part in range(most + 1)]
        return [order[a:b] for a, b in pairwise(edges) if a < b]

    def gather(self, rows: IntArray, where: IntArray, into: Rows) -> None:
        """Fill the places `where` of `into` with those of the selected `rows`."""
        if self._all is not None:
            self._bring(np.searchsorted(self._edges, rows[where], side="right") - 1, self._all)
            into.take_from(self._all, rows[where], where)
            return
        order, chunks, cuts = self._by_chunk(rows[where])
        for a, b in pairwise(cuts.tolist()):
            chunk, places = int(chunks[a]), where[order[a:b]]
            self._chunk_rows(chunk, places, rows[places] - self._edges[chunk], into)

    def _by_chunk(self, rows: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Return places of ascending rows, the chunk of each, and where in these another chunk begins, ends added."""
        order = np.argsort(rows, kind="stable")
        chunks = np.searchsorted(self._edges, rows[order], side="right") - 1
        return order, chunks, np.flatnonzero(np.diff(chunks, prepend=-1, append=-1))

    @property
    def holds_all(self) -> bool:
        """Whether every chunk has been decoded and is kept."""
        return self._all is not None and bool(self._is_there.all())

    def _bring(self, chunks: IntArray, everything: Rows) -> None:
        """Decode those of `chunks` that are not there yet; another thread may be decoding some of them."""
        for chunk in np.unique(chunks[~self._is_there[chunks]]).tolist():
            start, stop = int(self._edges[chunk]), int(self._edges[chunk + 1])
            self._chunks.get(chunk, partial(self._read_into, chunk, everything.view(start, stop)))
            self._is_there[chunk] = True

    def _read_into(self, chunk: int, rows: Rows) -> Rows:
        self._reader.read(Piece(chunk, 0, len(rows.numbers)), rows)
        return rows

    def _chunk_rows(self, chunk: int, where: IntArray, offsets: IntArray, into: Rows) -> None:
        """Fill the places `where` of `into` with rows of a chunk: ascending `offsets`."""
        height = int(self._edges[chunk + 1] - self._edges[chunk])
        if len(offsets) == height and _is_run(where):
            self._reader.read(Piece(chunk, 0, height), into.view(int(where[0]), int(where[0]) + height))
        elif self._reader.reads_single_rows(chunk):
            self._single_rows(chunk, where, offsets, into)
        else:
            kept = self._chunks.get(chunk, lambda: self._read_into(chunk, self._room(height)))
            into.take_from(kept, offsets, where)

    def _single_rows(self, chunk: int, where: IntArray, offsets: IntArray, into: Rows) -> None:
        """Read each run of rows by itself."""
        edges = [0, len(offsets)]
        if len(offsets) > 1:
            edges[1:1] = (np.flatnonzero((np.diff(offsets) != 1) | (np.diff(where) != 1)) + 1).tolist()
        for a, b in pairwise(edges):
            piece = Piece(chunk, int(offsets[a]), int(offsets[b - 1]) + 1)
            self._reader.read(piece, into.view(int(where[a]), int(where[a]) + b - a))


def _is_run(where: IntArray) -> bool:
    return len(where) == 1 or bool((np.diff(where) == 1).all())
