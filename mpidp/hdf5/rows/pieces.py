"""Enters: a data set, perhaps one part of its rows, and ranges of them by chunk. Leaves: their values."""

import threading
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mpidp.hdf5.files.dataset import DataSet, Rows
from mpidp.hdf5.order.keyed import IntArray
from mpidp.hdf5.order.plan import Piece
from mpidp.hdf5.order.split import Part, Split
from mpidp.hdf5.rows.rows import CACHE_BYTES, LARGE_ROW_BYTES, RowReader, reads_single_rows


@dataclass(frozen=True)
class Selection:
    """The rows of a data set that are used: all, or one part of a split."""

    dataset: DataSet
    split: Split | None = None
    part: Part = "train"

    @property
    def chunk_rows(self) -> IntArray:
        """Number of selected rows in each chunk, int64."""
        return self.dataset.chunk_rows if self.split is None else self.split.counts(self.part)

    def offsets(self, piece: Piece) -> IntArray:
        """Return where the selected rows of `piece` lie in their chunk: ascending int64 offsets."""
        assert self.split is not None
        return self.split.rows(piece.chunk, self.part)[piece.start : piece.stop]


class PieceReader:
    """Reads pieces: selected rows [start, stop) of a chunk; for any number of threads."""

    def __init__(self, selection: Selection, cache_bytes: int = CACHE_BYTES) -> None:
        self.selection = selection
        self._heights = selection.chunk_rows
        self._rows = RowReader(selection.dataset, cache_bytes)
        dataset = selection.dataset
        self._single = [reads_single_rows(dataset, file, cache_bytes) for file in range(len(dataset.files))]
        self._spans = threading.local()

    def read(self, piece: Piece, into: Rows) -> None:
        """Fill `into`, which has room for just the rows of `piece`."""
        if piece.start == piece.stop:
            return
        # The rest of a chunk that is cut between lanes will be wanted too.
        is_cut = piece.stop - piece.start < self._heights[piece.chunk]
        if self.selection.split is not None:
            self._read_selected(piece, into, is_cut)
            return
        self._read_run(int(self.selection.dataset.chunk_starts[piece.chunk]) + piece.start, into, is_cut)

    def _read_run(self, first: int, into: Rows, is_cut: bool) -> None:
        """Fill `into` with rows from `first` on, counted over all files, straight from their place in the file."""
        count = len(into.numbers)
        into.numbers[:] = np.arange(first, first + count)
        file, start = self.selection.dataset.file_of(first)
        for number, field in enumerate(self.selection.dataset.fields):
            self._rows.read(file, number, start, start + count, into.fields[field.name], is_cut)

    def _read_selected(self, piece: Piece, into: Rows, is_cut: bool) -> None:
        """Fill `into` with the selected rows of a piece: run by run, or by one read of the span they lie in."""
        rows = self.selection.dataset.chunk_starts[piece.chunk] + self.selection.offsets(piece)
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        is_large = self.selection.dataset.row_bytes >= LARGE_ROW_BYTES
        if not len(breaks) or (is_large and self.reads_single_rows(piece.chunk)):
            for a, b in pairwise([0, *breaks.tolist(), len(rows)]):
                self._read_run(int(rows[a]), into.view(a, b), is_cut)
            return
        span = self._span(int(rows[-1] - rows[0]) + 1)
        self._read_run(int(rows[0]), span, is_cut)
        into.take_from(span, rows - rows[0], np.arange(len(rows)))

    def _span(self, count: int) -> Rows:
        """Return room for `count` rows that is this thread's, used again by its next span."""
        span: Rows | None = getattr(self._spans, "rows", None)
        if span is None or len(span.numbers) < count:
            span = self._spans.rows = self.empty(count)
        return span.view(0, count)

    def reads_single_rows(self, chunk: int) -> bool:
        """Whether rows of a chunk may be read one by one at no cost but that of the reads."""
        file, _ = self.selection.dataset.file_of(int(self.selection.dataset.chunk_starts[chunk]))
        return self._single[file]

    def empty(self, count: int) -> Rows:
        """Return room for `count` rows."""
        return Rows.empty(self.selection.dataset.fields, count)

    def close(self) -> None:
        """Close all files."""
        self._rows.close()
