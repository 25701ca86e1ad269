"""Enters: which rows of a data set are to be held in memory, and how to read them. Leaves: rows as records of bytes.

A record is one row: all its fields, one after the other, so that one copy fetches a sample. Calls no MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mpidp.hdf5.files.dataset import Rows
from mpidp.hdf5.order.keyed import IntArray
from mpidp.hdf5.order.lanes import Piece
from mpidp.hdf5.rows.pieces import Selection

if TYPE_CHECKING:
    from mpidp.hdf5.decode.field import Field

# Fills `Rows`, which has room for just the rows of the piece; `PieceReader.read` does it.
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
