"""An HDF5 file enters, a source leaves: its datasets to be written with other chunks and filters."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidp.errors import DataError
from mpidp.hdf5.files.dangling import virtual_gaps
from mpidp.hdf5.files.file import Facts, inspect, open_file
from mpidp.hdf5.files.listing import list_datasets
from mpidp.hdf5.order.keyed import IntArray
from mpidp.hdf5.write.write import Template, holds_references, skipped_attributes
from mpidp.tools.convert.source import Source, SourceField, Values, file_identity

# Where there are no chunks, so much is read at a time.
_SPAN_BYTES = 4 << 20
_CACHE_BYTES = 8 << 20


class HDF5Source(Source):
    """Datasets of one HDF5 file; those with rows are written anew, others are copied as they are."""

    def __init__(self, path: str, fields: Sequence[str]) -> None:
        self._path = path
        self._file: Any = None
        self._remarks: list[str] = []
        self._all = not fields
        names = [name.strip("/") for name in fields] or [info.name for info in list_datasets(path).datasets]
        if not names:
            raise DataError(f"{path}: holds no datasets; give another file")
        with open_file(path, _CACHE_BYTES) as file:
            facts = {name: inspect(file, name) for name in names}
            for name, fact in facts.items():
                self._check(file, name, fact)
            self._names = [name for name in names if _has_rows(file[name])]
        self._others = [name for name in names if name not in self._names]
        if self._others:
            self._remarks.append(f"copied as they are: {', '.join(self._others)}")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    @property
    def fields(self) -> tuple[SourceField, ...]:
        """The datasets that are written anew; their types are those of the file, byte order and names included."""
        datasets = {name: self._dataset(name) for name in self._names}
        return tuple(
            SourceField(name, d.shape[0], d.shape[1:], d.dtype, {}, d.chunks[0] if d.chunks else 1)
            for name, d in datasets.items()
        )

    def take(self, names: Sequence[str], rows: IntArray) -> Values:
        """Return the rows; each stretch of the file that holds some of them is read once."""
        return {name: self._take(self._dataset(name), name, rows) for name in names}

    def identity(self) -> dict[str, Any]:
        """Return the file as it is, and the datasets that are taken."""
        return {"source": [file_identity(self._path)], "fields": [*self._names, *self._others]}

    @property
    def template(self) -> Template:
        """This file."""
        return Template(self._path, tuple(self._names), tuple(self._others))

    @property
    def remarks(self) -> Sequence[str]:
        """What is not written anew."""
        return self._remarks

    def _check(self, file: Any, name: str, facts: Facts) -> None:
        where = f'{self._path}: dataset "{name}"'
        dataset = file[name]
        if holds_references(dataset):
            raise DataError(
                f"{where} holds references into its own file, which mean nothing in another; name the datasets to "
                "convert by --fields"
            )
        if facts.unknown_filters:
            raise DataError(
                f"{where} is compressed with filter {', '.join(facts.unknown_filters)}, which this HDF5 library does "
                "not know; pip install 'mpidp[compression]'"
            )
        gaps = facts.unwritten or virtual_gaps(dataset)
        if gaps:
            raise DataError(
                f"{where}: {gaps} was never written or is missing, and would be converted as fill values; mend the "
                "file, or name other datasets by --fields"
            )
        if facts.type_name == "bfloat16":
            self._remarks.append(f"{name}: is bfloat16 and written as float32, which holds the same values")
        skipped = skipped_attributes(dataset)
        if skipped:
            self._remarks.append(f"{name}: left out attributes that refer into the old file: {', '.join(skipped)}")

    def _dataset(self, name: str) -> Any:
        if self._file is None:
            self._file = open_file(self._path, _CACHE_BYTES)
        return self._file[name]

    def _take(self, dataset: Any, name: str, rows: IntArray) -> npt.NDArray[Any]:
        values = np.empty((len(rows), *dataset.shape[1:]), dataset.dtype)
        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
        height = dataset.chunks[0] if dataset.chunks else max(1, _SPAN_BYTES // (dataset.nbytes // len(dataset)))
        cuts = np.flatnonzero(np.diff(ordered // height)) + 1
        for places, wanted in zip(np.split(order, cuts), np.split(ordered, cuts), strict=True):
            first, last = int(wanted[0]), int(wanted[-1])
            try:
                values[places] = dataset[first : last + 1][wanted - first]
            except OSError as error:
                raise DataError(
                    f'{self._path}: dataset "{name}", rows {first} to {last} cannot be read; mpidp data verify '
                    f"{self._path} lists all that is damaged. HDF5 says: {error}"
                ) from error
        return values


def _has_rows(dataset: Any) -> bool:
    """Return whether a dataset has rows of fixed size; text of any length, single values and the like have not."""
    if not dataset.shape or 0 in dataset.shape[1:]:
        return False
    try:
        dtype = dataset.dtype
    except TypeError:
        return False
    return not dtype.hasobject
