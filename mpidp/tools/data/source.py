"""Sources of a conversion: their base class, arrays of .npy and .npz files, and synthetic data.

A synthetic row depends on the seed, the field and the row alone, so chunks and workers cannot change it. Only raw
random streams are used, which NumPy keeps the same for ever.
"""

import math
import os
import re
import shutil
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidp.errors import ConfigError, DataError
from mpidp.hdf5.copy import Template
from mpidp.hdf5.plan import IntArray, check_seed, words

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


# Purposes of random streams; those of hdf5/plan.py are below 100.
_LABELS, _MEANS, _NOISE = 101, 102, 103
# Rows that are drawn from one stream, a number that depends on the field alone.
_BLOCK_VALUES = 1 << 14
_MEANS_KEPT = 64
# Whole-number pixels: the mean grey, and how many steps a unit of value is.
_GREY, _STEPS = 0.5, 0.125


class SyntheticSource(Source):
    """Rows whose floats and pixels scatter with unit variance around the mean pattern of their class.

    A whole-number field without a shape is the class, the same for all such fields. Others hold
    mean[class] + noise; in whole-number fields scaled to the middle of the type's range, 8 bits of it at most.
    """

    def __init__(self, fields: Sequence[str], num_rows: int, classes: int, seed: int) -> None:
        check_seed(seed)
        if num_rows < 0:
            raise ConfigError(f"--rows={num_rows}; expected 0 or more.")
        if classes < 1:
            raise ConfigError(f"--classes={classes}; expected at least 1.")
        if not fields:
            raise ConfigError("no --field was given; give at least one, such as --field=x:float32:3,32,32")
        self._num_rows, self._classes, self._seed = num_rows, classes, seed
        self._fields = tuple(_parse(text, num_rows) for text in fields)
        names = [field.name for field in self._fields]
        if len(set(names)) < len(names):
            raise ConfigError(f"--field: two fields have one name: {', '.join(names)}.")
        for field in self._fields:
            if _is_label(field) and classes - 1 > np.iinfo(field.dtype).max:
                raise ConfigError(f"--classes={classes} do not fit --field={field.name}:{field.dtype}.")

    @property
    def fields(self) -> tuple[SourceField, ...]:
        """As they were asked for."""
        return self._fields

    def take(self, names: Sequence[str], rows: IntArray) -> Values:
        """Return the rows."""
        fields = {field.name: field for field in self._fields}
        labels = self._labels(rows)
        return {
            name: labels.astype(fields[name].dtype)
            if _is_label(fields[name])
            else self._around(fields[name], labels, rows)
            for name in names
        }

    def _labels(self, rows: IntArray) -> IntArray:
        drawn = _rows_of_blocks(rows, _BLOCK_VALUES, lambda block: words(_BLOCK_VALUES, self._seed, _LABELS, block))
        return (drawn % np.uint64(self._classes)).astype(np.int64)

    def _around(self, field: SourceField, labels: IntArray, rows: IntArray) -> npt.NDArray[Any]:
        size = int(np.prod(field.shape, dtype=np.int64))
        key = zlib.crc32(field.name.encode())
        per_block = max(1, _BLOCK_VALUES // size)

        def noise(block: int) -> npt.NDArray[np.float32]:
            return _near_normal(words(per_block * size, self._seed, _NOISE, key, block)).reshape(per_block, size)

        values = _rows_of_blocks(rows, per_block, noise)
        for label in np.unique(labels).tolist():
            values[labels == label] += _mean(self._seed, key, label, size)
        return _into(values.reshape(len(rows), *field.shape), field.dtype)


def _rows_of_blocks(rows: IntArray, height: int, draw: Any) -> npt.NDArray[Any]:
    """Return the rows out of blocks of `height` rows, drawing each block that is needed once."""
    blocks, places = np.divmod(rows, height)
    needed, which = np.unique(blocks, return_inverse=True)
    parts: list[npt.NDArray[Any]] = []
    for number, block in enumerate(needed.tolist()):
        parts.append(draw(block)[places[which == number]])
    order = np.argsort(np.argsort(which, kind="stable"), kind="stable")
    return np.concatenate(parts)[order]


def _near_normal(drawn: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    """Return a value of mean 0 and variance 1 from each word: the sum of its four 16-bit parts, as good as normal.

    Sums of whole numbers are exact, so the values are the same on every machine.
    """
    parts = drawn.astype("<u8").view("<u2").reshape(-1, 4).sum(axis=1, dtype=np.int64)
    values: npt.NDArray[np.float64] = (parts * 2 - 4 * 65535) / (65536 * math.sqrt(4 / 3))
    return values.astype(np.float32)


@lru_cache(maxsize=_MEANS_KEPT)
def _mean(seed: int, key: int, label: int, size: int) -> npt.NDArray[np.float32]:
    """Return the mean pattern of a class: +1/2 or -1/2 at every place."""
    bits = words(size, seed, _MEANS, key, label) & np.uint64(1)
    return np.subtract(bits.astype(np.float32), np.float32(0.5))


def _into(values: npt.NDArray[np.float32], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the values in a field's type: bool is the sign, whole numbers are a grey of up to 8 bits."""
    if dtype.kind == "b":
        return np.greater(values, 0)
    if dtype.kind in "iu":
        top = min(255, np.iinfo(dtype).max)
        return np.asarray(np.clip(np.rint((_GREY + _STEPS * values) * top), 0, top).astype(dtype))
    return values.astype(dtype)


def _is_label(field: SourceField) -> bool:
    return field.dtype.kind in "iu" and field.shape == ()


def _parse(text: str, num_rows: int) -> SourceField:
    """Return the field that NAME:TYPE or NAME:TYPE:SIZE,SIZE means."""
    found = re.fullmatch(r"([^:]+):([a-z0-9]+)(?::(\d+(?:,\d+)*))?", text)
    try:
        dtype = np.dtype(found[2]) if found else None
    except TypeError:
        dtype = None
    shape = tuple(map(int, found[3].split(","))) if found and found[3] else ()
    if found is None or dtype is None or dtype.kind not in "biuf" or dtype.itemsize > 8 or 0 in shape:
        raise ConfigError(
            f"--field={text}; expected NAME:TYPE or NAME:TYPE:SIZE,SIZE, such as x:float32:3,32,32 or y:int64 (types "
            "are NumPy's: bool, int8 to int64, uint8 to uint64, float16 to float64)"
        )
    return SourceField(found[1].strip("/"), num_rows, shape, dtype)
