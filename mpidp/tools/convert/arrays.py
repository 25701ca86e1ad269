"""NumPy's .npy and .npz files enter, a source leaves: one dataset for each array, mapped and never read whole."""

import os
import shutil
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidp.errors import DataError
from mpidp.hdf5.order.keyed import IntArray
from mpidp.tools.convert.source import Source, SourceField, Values, is_run


class ArraySource(Source):
    """Arrays in .npy files, by name."""

    def __init__(self, paths: dict[str, str]) -> None:
        self._paths = paths
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        for name in paths:
            _check(paths[name], name, self._array(name))

    @property
    def fields(self) -> tuple[SourceField, ...]:
        """One for each array."""
        arrays = {name: self._array(name) for name in self._paths}
        return tuple(SourceField(name, array.shape[0], array.shape[1:], array.dtype) for name, array in arrays.items())

    def take(self, names: Sequence[str], rows: IntArray) -> Values:
        """Return copies of the rows."""
        if is_run(rows):
            return {name: np.array(self._array(name)[rows[0] : rows[-1] + 1]) for name in names}
        return {name: self._array(name)[rows] for name in names}

    def _array(self, name: str) -> npt.NDArray[Any]:
        if name not in self._arrays:
            path = self._paths[name]
            try:
                array = np.load(path, mmap_mode="r" if os.path.getsize(path) else None, allow_pickle=False)
            except (OSError, ValueError, EOFError) as error:
                raise DataError(f'{path}: array "{name}" cannot be read as .npy: {error}') from error
            self._arrays[name] = np.asarray(array)
        return self._arrays[name]


def open_npy(paths: Sequence[str]) -> ArraySource:
    """Return the arrays of .npy files, named as the files are without .npy; raises `DataError`."""
    names = [Path(path).stem for path in paths]
    for name in names:
        if names.count(name) > 1:
            raise DataError(f'{", ".join(paths)}: two files would both become dataset "{name}"; rename one')
    return ArraySource(dict(zip(names, map(str, paths), strict=True)))


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
    return ArraySource({name: str(unpacked) for name, unpacked in paths.items()})


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


def _check(path: str, name: str, array: npt.NDArray[Any]) -> None:
    if array.ndim == 0:
        raise DataError(f'{path}: array "{name}" is a single value; the first axis must count the samples')
    if array.dtype.kind not in "biufcS" or array.dtype.itemsize == 0:
        raise DataError(
            f'{path}: array "{name}" has type {array.dtype}, which HDF5 or a tensor cannot hold; write it as numbers '
            "(classes, times and text too)"
        )
