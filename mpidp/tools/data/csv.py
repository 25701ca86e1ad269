"""CSV files as the source of a conversion: x, the columns of numbers, and y, the label column.

The file is read once, in blocks, by the standard library's reader. Its values are written beside the target, as they
will be in it, and rows are taken from there in any order.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from mpidp.errors import ConfigError, DataError
from mpidp.printable import listed
from mpidp.tools.data.options import ConvertOptions
from mpidp.tools.data.source import ArraySource

LABELS, CLASSES = "y", "y_classes"
_BLOCK_CELLS = 1 << 18
# From here on a float64 may stand for several whole numbers.
_INEXACT = 2.0**53


class CsvSource(ArraySource):
    """Rows of numbers, and perhaps their labels. Raises `DataError` naming line and column."""

    def __init__(self, path: str, options: ConvertOptions, scratch: Path) -> None:
        table = _Table(path, options)
        arrays = table.unpack(scratch)
        self._texts = {"x_columns": [table.names[column] for column in table.columns]}
        if table.classes:
            self._texts[CLASSES] = list(table.classes)
        super().__init__(arrays, path)

    @property
    def texts(self) -> Mapping[str, Sequence[str]]:
        """The names of the columns, and those of the classes where labels are words."""
        return self._texts


class _Table:
    """A CSV file that is being read."""

    def __init__(self, path: str, options: ConvertOptions) -> None:
        self.path, self.options = path, options
        self.names: list[str] = []
        self.columns: list[int] = []
        self.classes: tuple[str, ...] = ()
        self._label: int | None = None
        is_tab = options.delimiter == "\\t" or Path(path).suffix.lower() == ".tsv"
        self._delimiter = "\t" if is_tab else options.delimiter
        if len(self._delimiter) != 1:
            raise ConfigError(f"--delimiter={options.delimiter}; expected one character, or \\t for a tab.")

    def unpack(self, scratch: Path) -> dict[str, npt.NDArray[Any]]:
        """Write x and y into `scratch` and return them, mapped."""
        labels: dict[str, int] = {}
        places = [np.zeros(0, np.int64)]
        num_rows = 0
        try:
            with open(scratch / "x", "wb") as x:
                for lines, rows in self._blocks():
                    x.write(self._numbers(lines, rows).tobytes())
                    num_rows += len(rows)
                    if self._label is not None:
                        words = (row[self._label].strip() for row in rows)
                        places.append(np.array([labels.setdefault(word, len(labels)) for word in words], np.int64))
        except OSError as error:
            raise DataError(f"{scratch.parent}: cannot be written: {error.strerror}") from error
        arrays = {"x": self._mapped(scratch / "x", (num_rows, len(self.columns)))}
        if self._label is not None:
            arrays[LABELS] = self._values_of(list(labels))[np.concatenate(places)]
        return arrays

    def _mapped(self, path: Path, shape: tuple[int, int]) -> npt.NDArray[Any]:
        if 0 in shape:
            return np.zeros(shape, self.options.dtype)
        return np.memmap(path, self.options.dtype, "r", shape=shape)

    def _values_of(self, labels: list[str]) -> npt.NDArray[Any]:
        """Return the number of each label: itself if all are numbers, else its place in alphabetical order."""
        if all(_is_integer(label) and -(2**63) <= int(label) < 2**63 for label in labels):
            return np.array([int(label) for label in labels], np.int64)
        if all(map(_is_number, labels)):
            return np.array([float(label) for label in labels], self.options.dtype)
        self.classes = tuple(sorted(labels))
        return np.array([self.classes.index(label) for label in labels], np.int64)

    def _blocks(self) -> Iterator[tuple[list[int], list[list[str]]]]:
        """Yield the line numbers and cells of some rows at a time; the first row tells the columns."""
        lines: list[int] = []
        rows: list[list[str]] = []
        try:
            with open(self.path, "rb") as file:
                for line, cells in self._rows(file):
                    if not self.names:
                        self._choose(cells)
                        if not self.options.no_header:
                            continue
                    if len(cells) != len(self.names):
                        raise DataError(
                            f"{self.path}, line {line}: has {len(cells)} cells, the first line has {len(self.names)}; "
                            "is --delimiter right?"
                        )
                    lines.append(line)
                    rows.append(cells)
                    if len(rows) * len(cells) >= _BLOCK_CELLS:
                        yield lines, rows
                        lines, rows = [], []
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}") from error
        if not self.names:
            raise DataError(f"{self.path}: is empty; expected a line of column names and lines of numbers")
        yield lines, rows

    def _rows(self, file: BinaryIO) -> Iterator[tuple[int, list[str]]]:
        """Yield the rows that are not blank, with the number of the line in which each ends."""
        texts = (line.decode() for line in chain([file.readline().removeprefix(b"\xef\xbb\xbf")], file))
        reader = csv.reader(texts, delimiter=self._delimiter, strict=True)
        while True:
            try:
                cells = next(reader, None)
            except (csv.Error, UnicodeDecodeError) as error:
                line = reader.line_num + isinstance(error, UnicodeDecodeError)  # a line is counted when it is text
                raise DataError(f"{self.path}, line {line}: cannot be read as CSV: {error}") from error
            if cells is None:
                return
            if len(cells) > 1 or any(cell.strip() for cell in cells):
                yield reader.line_num, cells

    def _choose(self, first: list[str]) -> None:
        """Name the columns by the first row, and choose those of x and of the label."""
        options, cells = self.options, [cell.strip() for cell in first]
        names = list(map(str, range(len(cells)))) if options.no_header else cells
        if not options.no_header and all(map(_is_number, cells)):
            raise ConfigError(
                f"{self.path}: its first line holds numbers only, {cells[:4]}; give --no-header if it has no names"
            )
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise DataError(f'{self.path}: two columns are called "{twice[0]}"; rename one')
        for name in (*options.columns, *([] if options.label is None else [options.label])):
            if name not in names:
                raise ConfigError(f'{self.path}: no column "{name}"; its columns are {listed(names)}')
        self._label = None if options.label is None else names.index(options.label)
        self.columns = [names.index(name) for name in options.columns]
        self.columns = self.columns or [number for number in range(len(names)) if number != self._label]
        if not self.columns:
            raise ConfigError(f"{self.path}: no columns are left for x beside the label")
        self.names = names

    def _numbers(self, lines: list[int], rows: list[list[str]]) -> npt.NDArray[Any]:
        """Return x of some rows in the type asked for, or raise for a number that would be changed."""
        cells = np.array([[row[column] for column in self.columns] for row in rows], object)
        cells = cells.reshape(len(rows), len(self.columns))
        try:
            values = cells.astype(np.float64)
        except ValueError:
            values = self._one_by_one(lines, cells)
        with np.errstate(over="ignore"):
            narrow = values.astype(self.options.dtype)
        is_whole = values == np.rint(values)
        for place, position in np.argwhere(is_whole & ((narrow != values) | (np.abs(values) >= _INEXACT))).tolist():
            text = cells[place, position].strip()
            if float(narrow[place, position]) != (int(text) if _is_integer(text) else values[place, position]):
                dtype = self.options.dtype
                advice = f"{'give --dtype=float64, or ' * (dtype == 'float32')}leave the column out"
                raise self._error(lines[place], position, f"{text} does not fit {dtype} exactly; {advice}")
        return narrow

    def _one_by_one(self, lines: list[int], cells: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        values = np.full(cells.shape, np.nan)
        for (place, position), cell in np.ndenumerate(cells):
            if cell.strip() and _is_number(cell):
                values[place, position] = float(cell)
            elif cell.strip() or not self.options.empty_as_nan:
                found = f'"{cell}" is not a number' if cell.strip() else "the cell is empty"
                advice = "leave the column out by --columns, make it the --label"
                raise self._error(lines[place], position, f"{found}; correct it, {advice}, or give --empty-as-nan")
        return values

    def _error(self, line: int, position: int, text: str) -> DataError:
        return DataError(f'{self.path}, line {line}, column "{self.names[self.columns[position]]}": {text}')


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_integer(text: str) -> bool:
    """Return whether a cell is a whole number, of any size."""
    try:
        int(text)
    except ValueError:
        return False
    return True
