"""Small HDF5 files, and their rows as the two ways of reading and as h5py give them."""

from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpidp.hdf5.dataset import DataSet
from mpidp.hdf5.field import Converter, FieldSpec
from mpidp.hdf5.files.describe import describe
from mpidp.hdf5.read import CACHE_BYTES, PlainReader, RowReader, Selection


def write(path: Path, **datasets: Any) -> Path:
    """Write datasets: arrays, links, or pairs of an array and keywords of create_dataset."""
    with h5py.File(path, "w") as file:
        for name, given in datasets.items():
            if isinstance(given, tuple):
                file.create_dataset(name, data=given[0], **given[1])
            else:
                file[name] = given
    return path


def low_level(
    path: Path, kind: Any, shape: tuple[int, ...], values: Any = None, libver: str | None = None, **settings: Any
) -> Path:
    """Write one dataset through the low-level interface; `settings` are calls on its creation property list."""
    with h5py.File(path, "w", libver=libver) as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        for name, arguments in settings.items():
            getattr(plist, name)(*arguments)
        dataset = h5py.Dataset(h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple(shape), plist))
        if values is not None:
            dataset[...] = values
    return path


def read_rows(
    dataset: DataSet, start: int = 0, stop: int | None = None, file: int = 0, number: int = 0, **options: Any
) -> np.ndarray:
    """Rows [start, stop), to the end by default, of one field of a file, as batches hold them."""
    field, stop = dataset.fields[number], dataset.files[file].num_rows if stop is None else stop
    into = np.empty((stop - start, *field.shape), field.dtype)
    with closing(RowReader(Selection(dataset), **options)) as reader:
        reader.read_field(file, number, start, stop, into)
    return into


def all_rows(path: Path | list[Path], field: str | FieldSpec = "x", **options: Any) -> np.ndarray:
    """Every row of one field, file after file."""
    dataset = describe(path, (field,), **options)
    return np.concatenate([read_rows(dataset, file=number) for number in range(len(dataset.files))])


def same_as_h5py(path: Path, spec: FieldSpec | str = "x", cache_bytes: int = CACHE_BYTES, **options: Any) -> DataSet:
    """Describe a file; check ranges of its rows, read in both ways, against h5py; return what was found."""
    dataset = describe(path, (spec,), **options)
    field, rows = dataset.fields[0], dataset.num_rows
    with h5py.File(path) as file:
        expected = np.moveaxis(file[field.dataset][()], field.axis, 0)
    for start, stop in {(0, rows), (rows // 3, rows), (rows // 2, rows // 2 + 1), (0, max(1, rows - 1))}:
        into = np.empty((stop - start, *field.shape), field.dtype)
        with closing(PlainReader(dataset)) as plain:
            Converter(field)(plain.read(0, field, start, stop), into)
        for found in (read_rows(dataset, start, stop, cache_bytes=cache_bytes), into):
            np.testing.assert_array_equal(found, expected[start:stop].astype(field.dtype), err_msg=f"{path} {spec}")
    return dataset
