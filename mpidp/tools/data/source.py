"""The base class of a conversion's sources, and the one of .npy and .npz files."""

import os
import shutil
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidp.errors import DataError
from mpidp.hdf5.copy import Template
from mpidp.hdf5.plan import IntArray

Values = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class SourceField:
    """A dataset that the conversion will write: `num_rows` arrays of `shape`.

    `read_rows` are the rows that a source has to decode together, 1 where it reads any row by itself. For `type_name`,
    `like` and `fill` see `NewDataset`.
    """

    name: str
    num_rows: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read_rows: int = 1
    type_name: str = ""
    like: str = ""
    fill: bytes = b""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Source(ABC):
    """Rows to be written as HDF5. Several threads take rows at once."""

    @property
    @abstractmethod
    def fields(self) -> tuple[SourceField, ...]:
        """The datasets that it becomes, in the order in which they are written."""

    @abstractmethod
    def take(self, names: Sequence[str], rows: IntArray) -> Values:
        """Return the rows (any order, any subset) of fields with equal numbers of rows, as (rows, *shape).

        Raises `DataError` naming the place for values that cannot be read.
        """

    def close(self) -> None:
        """Close what is open."""
        return

    @property
    def texts(self) -> Mapping[str, Sequence[str]]:
        """Datasets of strings that are written besides, such as the names of classes."""
        return {}

    @property
    def template(self) -> Template | None:
        """The HDF5 file of which all that is not written anew is copied."""
        return None

    @property
    def remarks(self) -> Sequence[str]:
        """What the user should know: what was left out, and why."""
        return ()


def is_run(rows: IntArray) -> bool:
    """Return whether the rows follow each other."""
    return bool(len(rows)) and bool(np.all(np.diff(rows) == 1))


class ArraySource(Source):
    """Arrays by name, such as those mapped from files; `place` is where they are from, for errors."""

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]], place: str) -> None:
        self._arrays = dict(arrays)
        for name, array in arrays.items():
            if array.ndim == 0:
                raise DataError(f'{place}: array "{name}" is a single value; the first axis must count the samples')
            if array.dtype.kind not in "biufcS" or array.dtype.itemsize == 0:
                raise DataError(
                    f'{place}: array "{name}" has type {array.dtype}, which HDF5 or a tensor cannot hold; write it as '
                    "numbers (classes, times and text too)"
                )

    @property
    def fields(self) -> tuple[SourceField, ...]:
        """One for each array."""
        arrays = self._arrays.items()
        return tuple(SourceField(name, array.shape[0], array.shape[1:], array.dtype) for name, array in arrays)

    def take(self, names: Sequence[str], rows: IntArray) -> Values:
        """Return copies of the rows."""
        if is_run(rows):
            return {name: np.array(self._arrays[name][rows[0] : rows[-1] + 1]) for name in names}
        return {name: self._arrays[name][rows] for name in names}


def open_npy(paths: Sequence[str]) -> ArraySource:
    """Return the arrays of .npy files, named as the files are without .npy; raises `DataError`."""
    names = [Path(path).stem for path in paths]
    for name in names:
        if names.count(name) > 1:
            raise DataError(f'{", ".join(paths)}: two files would both become dataset "{name}"; rename one')
    arrays = {name: _mapped(path, name) for name, path in zip(names, paths, strict=True)}
    return ArraySource(arrays, ", ".join(paths))


def _mapped(path: str | Path, name: str) -> npt.NDArray[Any]:
    try:
        array = np.load(path, mmap_mode="r" if os.path.getsize(path) else None, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f'{path}: array "{name}" cannot be read as .npy: {error}') from error
    return np.asarray(array)


def open_npz(path: str, fields: Sequence[str], scratch: Path) -> ArraySource:
    """Return the arrays of a .npz file, all or those of `fields`; raises `DataError`.

    The archive can only be read from its start, so its arrays are first unpacked into the folder `scratch`.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
            missing = [name for name in fields if name not in names]
            if missing:
                raise DataError(f'{path}: no array "{missing[0]}"; the file holds {", ".join(names) or "no arrays"}')
            taken = list(fields) or names
            if not taken:
                raise DataError(f"{path}: holds no arrays; give another file")
            # Numbered, since a name in an archive may hold anything.
            paths = {name: scratch / f"{number}.npy" for number, name in enumerate(taken)}
            _check_room(archive, path, taken, scratch.parent)
            for name, unpacked in paths.items():
                _unpack(archive, f"{name}.npy", unpacked)
    except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, zlib.error) as error:  # a password, another method
        raise DataError(f"{path}: cannot be read as .npz: {error}; write or copy it again") from error
    return ArraySource({name: _mapped(unpacked, name) for name, unpacked in paths.items()}, path)


def _check_room(archive: zipfile.ZipFile, path: str, names: Sequence[str], folder: Path) -> None:
    """Raise `DataError` where arrays are larger than the free space: a thousandth of it is enough for the archive."""
    needed = sum(archive.getinfo(f"{name}.npy").file_size for name in names)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(f"{path}: its arrays have {needed:,} bytes, and {folder} has {free:,} free; choose --fields")


def _unpack(archive: zipfile.ZipFile, name: str, target: Path) -> None:
    """Write a member to its own file; ZIP's checksum is checked on the way."""
    with archive.open(name) as packed, open(target, "wb") as unpacked:
        shutil.copyfileobj(packed, unpacked, 1 << 20)
