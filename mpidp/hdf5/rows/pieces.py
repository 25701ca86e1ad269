"""Enters: a data set, perhaps one part of its rows, and ranges of them by chunk. Leaves: their values."""

from dataclasses import dataclass

import numpy as np

from mpidp.hdf5.files.dataset import DataSet, Rows
from mpidp.hdf5.order.keyed import IntArray
from mpidp.hdf5.order.lanes import Piece
from mpidp.hdf5.order.split import Part, Split
from mpidp.hdf5.rows.rows import RowReader


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

    def __init__(self, selection: Selection, cache_bytes: int = 64 * 2**20) -> None:
        self.selection = selection
        self._heights = selection.chunk_rows
        self._rows = RowReader(selection.dataset, cache_bytes)

    def read(self, piece: Piece, into: Rows) -> None:
        """Fill `into`, which has room for just the rows of `piece`, by one read of the span they lie in."""
        if piece.start == piece.stop:
            return
        # The rest of a chunk that is cut between lanes will be wanted too.
        is_cut = piece.stop - piece.start < self._heights[piece.chunk]
        if self.selection.split is not None:
            self._read_selected(piece, into, is_cut)
            return
        dataset = self.selection.dataset
        first = int(dataset.chunk_starts[piece.chunk]) + piece.start
        count = piece.stop - piece.start
        into.numbers[:] = np.arange(first, first + count)
        file, start = dataset.file_of(first)
        for number, field in enumerate(dataset.fields):
            self._rows.read(file, number, start, start + count, into.fields[field.name], is_cut)

    def _read_selected(self, piece: Piece, into: Rows, is_cut: bool) -> None:
        dataset = self.selection.dataset
        offsets = self.selection.offsets(piece)
        into.numbers[:] = dataset.chunk_starts[piece.chunk] + offsets
        file, start = dataset.file_of(int(into.numbers[0]))
        span = int(offsets[-1] - offsets[0]) + 1
        for number, field in enumerate(dataset.fields):
            values = np.empty((span, *field.shape), field.dtype)
            self._rows.read(file, number, start, start + span, values, is_cut)
            values.take(offsets - offsets[0], axis=0, out=into.fields[field.name], mode="clip")

    def reads_single_rows(self, chunk: int) -> bool:
        """Whether rows of a chunk may be read one by one at no cost but that of the reads."""
        file, _ = self.selection.dataset.file_of(int(self.selection.dataset.chunk_starts[chunk]))
        return all(storage is not None and storage.is_plain for storage in self.selection.dataset.files[file].storages)

    def empty(self, count: int) -> Rows:
        """Return room for `count` rows."""
        return Rows.empty(self.selection.dataset.fields, count)

    def close(self) -> None:
        """Close all files."""
        self._rows.close()
