"""Enters: paths of HDF5 files and names of datasets. Leaves: a checked `DataSet`; no file stays open.

Everything that can be known to be wrong with the files is said here, before training starts.
"""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mpidp.errors import DataError
from mpidp.hdf5.dataset import DataSet, Field, StoredFile
from mpidp.hdf5.file import Facts, inspect, open_file

Paths = str | Path | Sequence[str | Path]

_CONTIGUOUS_RANGE_BYTES = 2**20
_CODES = ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
_SUPPORTED = {np.dtype(code) for code in _CODES}


def absolute_paths(paths: Paths) -> tuple[str, ...]:
    """Return absolute paths, "~" expanded."""
    given = [paths] if isinstance(paths, str | Path) else paths
    return tuple(str(Path(path).expanduser().absolute()) for path in given)


def describe(paths: Paths, fields: Sequence[str]) -> DataSet:
    """Return what the files hold: datasets `fields`, over the rows of all files laid end to end.

    Warns about files written by MATLAB, whose axes are reversed. Raises `DataError` naming file and dataset
    for whatever cannot be trained on. Not collective.
    """
    if isinstance(fields, str) or not fields or len(set(fields)) != len(fields):
        raise DataError(f"fields is {fields!r}; give a sequence of different dataset names, such as ('x', 'y')")
    files: list[StoredFile] = []
    first: tuple[Field, ...] = ()
    for path in _distinct(absolute_paths(paths)):
        stored, found = _describe_file(path, fields)
        first = first or found
        _check_same(first, files[0].path if files else path, found, path)
        files.append(stored)
    return DataSet(first, tuple(files))


def check_present(dataset: DataSet) -> None:
    """Raise `DataError` unless this node sees the files as they were when `dataset` was described."""
    for file in dataset.files:
        try:
            size_bytes = os.stat(file.path).st_size
        except OSError as error:
            raise DataError(f"{file.path}: rank 0 reads it, but here: {error.strerror}") from error
        if size_bytes != file.size_bytes:
            raise DataError(
                f"{file.path}: {size_bytes} bytes here, {file.size_bytes} on rank 0; give all nodes the same file"
            )


def _distinct(paths: tuple[str, ...]) -> tuple[str, ...]:
    if not paths:
        raise DataError("no file was given; give the path of at least one HDF5 file")
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise DataError(f"{twice}: given more than once, so its samples would come more than once; give it once")
    return paths


def _describe_file(path: str, names: Sequence[str]) -> tuple[StoredFile, tuple[Field, ...]]:
    with open_file(path, cache_bytes=0) as file:
        facts = {name: inspect(file, name) for name in names}
    fields = tuple(_check_field(path, name, fact) for name, fact in facts.items())
    lengths = {name: fact.shape[0] for name, fact in facts.items() if fact.shape}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f'"{name}" has {length}' for name, length in lengths.items())
        raise DataError(f"{path}: the fields have different numbers of rows: {found}; they must be equal")
    num_rows = lengths[names[0]]
    if num_rows == 0:
        raise DataError(f"{path}: its datasets have no rows; leave the file out or write it again")
    range_rows, chunked = _range_rows(fields, facts)
    return StoredFile(path, os.path.getsize(path), num_rows, range_rows, chunked), fields


def _check_field(path: str, name: str, facts: Facts) -> Field:
    where = f'{path}: dataset "{name}"'
    if not facts.shape:
        kind = "has no dataspace" if facts.shape is None else "is a single value"
        raise DataError(f"{where} {kind}; give a dataset whose first axis counts the samples")
    if facts.dtype not in _SUPPORTED or facts.dtype is None:
        raise DataError(
            f"{where} has type {facts.type_name}, which no tensor can hold; write it as bool, 8 to 64-bit "
            "integers, 16 to 64-bit floats or complex numbers (classes and strings as numbers)"
        )
    if 0 in facts.shape[1:]:
        raise DataError(f"{where} has shape {facts.shape}: its samples hold no values; leave this field out")
    if facts.elsewhere:
        raise DataError(
            f"{where} is {facts.elsewhere}; HDF5 reads a missing source as fill values without a word, "
            "so give the files that hold the values as paths, or copy them into one file"
        )
    if facts.unknown_filters:
        raise DataError(
            f"{where} is compressed with filter {', '.join(facts.unknown_filters)}, which this HDF5 "
            "library does not know; pip install hdf5plugin, or write it with gzip"
        )
    if facts.unwritten:
        raise DataError(f"{where}: {facts.unwritten} was never written and would read as fill values; write again")
    if facts.matlab_class:
        warnings.warn(
            f"{where} was written by MATLAB ({facts.matlab_class}): its axes are reversed. Its shape here is "
            f"{facts.shape}, and the first axis is taken to count the samples",
            stacklevel=2,
        )
    return Field(name, facts.shape[1:], facts.dtype)


def _range_rows(fields: tuple[Field, ...], facts: dict[str, Facts]) -> tuple[int, bool]:
    """Return how many rows to read together and whether that is a chunk's height.

    The chunks of the field with most bytes a row decide: decoding it costs most.
    """
    chunked = [field for field in fields if facts[field.name].chunks]
    if chunked:
        chunks = facts[max(chunked, key=lambda field: field.row_bytes).name].chunks
        assert chunks is not None
        return chunks[0], True
    return max(1, _CONTIGUOUS_RANGE_BYTES // sum(field.row_bytes for field in fields)), False


def _check_same(first: tuple[Field, ...], first_path: str, found: tuple[Field, ...], path: str) -> None:
    for here, there in zip(first, found, strict=True):
        if here != there:
            raise DataError(
                f'dataset "{here.name}" is {here.stored} of shape {here.shape} a sample in {first_path}, but '
                f"{there.stored} of shape {there.shape} in {path}; files of one data set must agree"
            )
