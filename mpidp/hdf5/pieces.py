"""Enters: a data set, perhaps one part of its rows, and ranges of them by chunk. Leaves: their values."""

from dataclasses import dataclass

import numpy as np

from mpidp.hdf5.dataset import DataSet, Rows
from mpidp.hdf5.keyed import IntArray
from mpidp.hdf5.lanes import Piece
from mpidp.hdf5.reader import Reader
from mpidp.hdf5.split import Part, Split


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
        if self.split is None:
            return np.arange(piece.start, piece.stop, dtype=np.int64)
        return self.split.rows(piece.chunk, self.part)[piece.start : piece.stop]


class PieceReader:
    """Reads pieces: selected rows [start, stop) of a chunk."""

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        self._reader = Reader(selection.dataset)

    def read(self, piece: Piece, into: Rows) -> None:
        """Fill `into`, which has room for just the rows of `piece`, by one read of the span they lie in."""
        if piece.start == piece.stop:
            return
        dataset = self.selection.dataset
        offsets = self.selection.offsets(piece)
        into.numbers[:] = dataset.chunk_starts[piece.chunk] + offsets
        file, start = dataset.file_of(int(into.numbers[0]))
        span = int(offsets[-1] - offsets[0]) + 1
        for field in dataset.fields:
            values = self._reader.read(file, field, start, start + span)
            into.fields[field.name][:] = values if span == len(offsets) else values[offsets - offsets[0]]

    def empty(self, count: int) -> Rows:
        """Return room for `count` rows."""
        return Rows.empty(self.selection.dataset.fields, count)

    def close(self) -> None:
        """Close all files."""
        self._reader.close()
