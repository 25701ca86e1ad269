"""CSV files as the source of a conversion: x, the columns of numbers, and y, the label column.

The file is read once to learn where its rows begin and which labels there are; 8 bytes a row are kept on disk.
"""

import array
import csv
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mpidp.errors import ConfigError, DataError
from mpidp.hdf5.order.keyed import IntArray
from mpidp.tools.data.source import Source, SourceField, Values, is_run


@dataclass(frozen=True)
class CsvOptions:
    """How to read a CSV file."""

    label: str | None = None
    columns: tuple[str, ...] = ()
    dtype: Literal["float32", "float64"] = "float32"
    delimiter: str = ","
    has_header: bool = True
    empty_as_nan: bool = False


def choose(path: str, names: list[str], options: CsvOptions) -> tuple[list[int], int | None]:
    """Return the columns of x and of the label; raises `ConfigError` for names that are not there."""
    for name in (*options.columns, *([options.label] if options.label is not None else [])):
        if name not in names:
            raise ConfigError(f'{path}: no column "{name}"; its columns are {", ".join(names)}')
    label = names.index(options.label) if options.label is not None else None
    chosen = [names.index(name) for name in options.columns] or [n for n in range(len(names)) if n != label]
    if not chosen:
        raise ConfigError(f"{path}: no columns are left for x beside the label")
    return chosen, label


def is_number(text: str) -> bool:
    """Return whether a cell is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def is_integer(text: str) -> bool:
    """Return whether a cell is a whole number that int64 holds."""
    try:
        return -(2**63) <= int(text) < 2**63
    except ValueError:
        return False


LABELS, CLASSES = "y", "y_classes"


class CsvSource(Source):
    """Rows of numbers, and perhaps their labels. Raises `DataError` naming line and column."""

    def __init__(self, path: str, options: CsvOptions, scratch: Path) -> None:
        self._path = path
        self._options = options
        self._width = 0  # not known yet
        names = self._header()
        self._width = len(names)
        self._columns, self._label = choose(path, names, options)
        self._names = names
        self._starts_path = scratch / "row_starts.npy"
        self._classes, self._label_type = self._scan()
        self._class_numbers = {name: number for number, name in enumerate(self._classes)}
        self._starts: IntArray | None = None

    @property
    def fields(self) -> tuple[SourceField, ...]:
        """x, and y where a label column was named."""
        count = len(self._row_starts())
        columns = [self._names[column] for column in self._columns]
        x = SourceField("x", count, (len(columns),), np.dtype(self._options.dtype))
        return (x,) if self._label is None else (x, SourceField(LABELS, count, (), self._label_type))

    @property
    def texts(self) -> Mapping[str, Sequence[str]]:
        """The names of the columns, and those of the classes where labels are words."""
        columns = {"x_columns": [self._names[column] for column in self._columns]}
        return {**columns, CLASSES: list(self._classes)} if self._classes else columns

    def take(self, names: Sequence[str], rows: IntArray) -> Values:
        """Return the rows of x and y."""
        x = np.empty((len(rows), len(self._columns)), np.float64)
        y = np.empty(len(rows), self._label_type)
        for place, (row, cells) in enumerate(self._rows(rows)):
            for position, column in enumerate(self._columns):
                x[place, position] = self._number(cells[column], row, column)
            if self._label is not None:
                y[place] = self._label_of(cells[self._label], row)
        return {name: values for name, values in (("x", self._narrow(x, rows)), (LABELS, y)) if name in names}

    def _header(self) -> list[str]:
        with self._open() as file:
            first = next((line for line in file if line.strip()), b"")
        if not first:
            raise DataError(f"{self._path}: is empty; expected a line of column names and lines of numbers")
        cells = [cell.strip() for cell in self._cells(first.removeprefix(b"\xef\xbb\xbf"), 1)]
        if not self._options.has_header:
            return [str(number) for number in range(len(cells))]
        if all(map(is_number, cells)):
            raise ConfigError(
                f"{self._path}: its first line holds numbers only, {cells[:4]}; give --no-header if it has no names"
            )
        twice = [name for name in cells if cells.count(name) > 1]
        if twice:
            raise DataError(f'{self._path}: two columns are called "{twice[0]}"; rename one')
        return cells

    def _scan(self) -> tuple[tuple[str, ...], np.dtype[Any]]:
        """Write where rows begin; return the classes (empty where labels are numbers) and the type of labels."""
        starts = array.array("q")
        labels: set[str] = set()
        position, header = 0, self._options.has_header
        with self._open() as file:
            for number, line in enumerate(file, start=1):
                if line.strip() and not header:
                    starts.append(position)
                    if self._label is not None:
                        labels.add(self._cells(line, number)[self._label].strip())
                header = header and not line.strip()
                position += len(line)
        np.save(self._starts_path, np.frombuffer(starts, np.int64) if starts else np.zeros(0, np.int64))
        if all(map(is_integer, labels)):
            return (), np.dtype(np.int64)
        if all(map(is_number, labels)):
            return (), np.dtype(self._options.dtype)
        return tuple(sorted(labels)), np.dtype(np.int64)

    def _rows(self, rows: IntArray) -> Iterator[tuple[int, list[str]]]:
        """Yield (row, cells) of each row in the order given."""
        starts = self._row_starts()
        is_one_run = is_run(rows)
        with self._open() as file:
            for count, row in enumerate(rows.tolist()):
                if not count or not is_one_run:
                    file.seek(int(starts[row]))
                line = next(line for line in iter(file.readline, b"") if line.strip())
                yield row, self._cells(line, row, is_row=True)

    def _cells(self, line: bytes, number: int, is_row: bool = False) -> list[str]:
        """Split a line; `number` is for the error: that of the line, or of the row."""
        try:
            (cells,) = csv.reader([line.decode().strip("\r\n")], delimiter=self._options.delimiter, strict=True)
        except (csv.Error, UnicodeDecodeError, ValueError) as error:
            where = self._line(number) if is_row else number
            raise DataError(f"{self._path}, line {where}: cannot be read as CSV: {error}") from error
        if self._width and len(cells) != self._width:
            raise DataError(
                f"{self._path}, line {self._line(number) if is_row else number}: has {len(cells)} cells, the first "
                f"line has {self._width}; is --delimiter right?"
            )
        return cells

    def _line(self, row: int) -> int:
        """Return the line of a row, for an error."""
        with self._open() as file:
            begins = itertools.accumulate(map(len, file), initial=0)
            start = int(self._row_starts()[row])
            return next(number for number, begin in enumerate(begins, start=1) if begin == start)

    def _number(self, cell: str, row: int, column: int) -> float:
        if not cell.strip() and self._options.empty_as_nan:
            return float("nan")
        try:
            return float(cell)
        except ValueError:
            found = f'"{cell}" is not a number' if cell.strip() else "the cell is empty"
            raise DataError(
                f'{self._path}, line {self._line(row)}, column "{self._names[column]}": {found}; mend it, leave the '
                "column out by --columns, make it the --label, or give --empty-as-nan for empty cells"
            ) from None

    def _label_of(self, cell: str, row: int) -> float:
        assert self._label is not None
        if self._classes:
            return self._class_numbers[cell.strip()]
        return self._number(cell, row, self._label) if self._label_type.kind == "f" else int(cell)

    def _narrow(self, x: npt.NDArray[np.float64], rows: IntArray) -> npt.NDArray[Any]:
        """Return x in the type asked for; raises where float32 would change a whole number."""
        narrow = x.astype(self._options.dtype)
        changed = np.argwhere((narrow != x) & (x == np.rint(x)))
        if len(changed):
            place, position = changed[0]
            raise DataError(
                f'{self._path}, line {self._line(int(rows[place]))}, column "{self._names[self._columns[position]]}": '
                f"{x[place, position]:.0f} does not fit float32 exactly; give --dtype=float64, or leave the column out"
            )
        return narrow

    def _row_starts(self) -> IntArray:
        if self._starts is None:
            self._starts = np.load(self._starts_path)
        return self._starts

    def _open(self) -> Any:
        try:
            return open(self._path, "rb")
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read: {error.strerror}") from error
