"""Enters: paths of HDF5 files and names of datasets. Leaves: a checked `DataSet`; no file stays open.

Everything that can be known to be wrong with the files is said here, before training starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mpidp.errors import DataError
from mpidp.hdf5.decode.field import Decode, Field, Fields, FieldSpec, field_specs
from mpidp.hdf5.decode.storage import Storage
from mpidp.hdf5.files.damage import damage_told
from mpidp.hdf5.files.dataset import DataSet, StoredFile
from mpidp.hdf5.files.file import inspect, open_file
from mpidp.hdf5.files.fingerprint import digest
from mpidp.hdf5.files.found import FoundDataset
from mpidp.hdf5.files.locate import locate

Paths = str | Path | Sequence[str | Path]

_CONTIGUOUS_RANGE_BYTES = 2**20
_LEAST_RANGE_BYTES = 64 * 2**10
_MOST_RANGE_BYTES = 256 * 2**20
_ENOUGH_RANGES = 2**10
# A range of tiny rows costs what their number costs, to permute, rather than what their bytes cost to read.
_ENOUGH_ROWS = 2**13
_MOST_RANGES = 2**20


def absolute_paths(paths: Paths) -> tuple[str, ...]:
    """Return absolute paths, "~" expanded."""
    given = [paths] if isinstance(paths, str | Path) else paths
    return tuple(str(Path(os.path.expanduser(path)).absolute()) for path in given)


def describe(paths: Paths, fields: Fields, allow_holes: bool = False) -> DataSet:
    """Return what the files hold: datasets `fields`, over the rows of all files laid end to end.

    With `allow_holes`, chunks that were never written read as the dataset's fill value; otherwise they are an
    error. Warns about files written by MATLAB, whose axes are reversed. Raises `DataError` naming file and
    dataset for whatever cannot be trained on. Not collective.
    """
    specs = field_specs(fields)
    files: list[StoredFile] = []
    first: tuple[Field, ...] = ()
    for path in _distinct(absolute_paths(paths)):
        stored, found = _describe_file(path, specs, allow_holes)
        first = first or found
        _check_same(first, files[0].path if files else path, found, path)
        files.append(stored)
    return DataSet(first, tuple(files), decoders(specs))


def decoders(specs: Iterable[FieldSpec]) -> dict[str, Decode]:
    """Return the decode functions of those fields that have one, by name of the field."""
    return {spec.name: spec.decode for spec in specs if spec.decode is not None}


def check_present(dataset: DataSet) -> None:
    """Raise `DataError` unless this node sees the files as they were when `dataset` was described."""
    for path, expected in (entry for file in dataset.files for entry in file.sizes.items()):
        try:
            size_bytes = os.stat(path).st_size
        except OSError as error:
            raise DataError(f"{path}: rank 0 reads it, but here: {error.strerror}") from error
        if size_bytes != expected:
            raise DataError(f"{path}: {size_bytes} bytes here, {expected} on rank 0; give all nodes the same file")


def _distinct(paths: tuple[str, ...]) -> tuple[str, ...]:
    if not paths:
        raise DataError("no file was given; give the path of at least one HDF5 file")
    found: dict[str, str] = {}
    for path in paths:
        other = found.setdefault(os.path.realpath(path), path)
        if other is not path:
            named = "" if other == path else f", also as {other}"
            raise DataError(
                f"{path}: given more than once{named}, so its samples would come more than once; give it once"
            )
    return paths


def _describe_file(path: str, specs: Sequence[FieldSpec], allow_holes: bool) -> tuple[StoredFile, tuple[Field, ...]]:
    with open_file(path, cache_bytes=0) as file, damage_told(path):
        found = [FoundDataset(path, spec, inspect(file, spec.dataset)) for spec in specs]
        for each in found:
            each.check(allow_holes)
        num_rows = _common_rows(path, found)
        located = [_located(file, each) for each in found]
        homes = [path, *(file[spec.dataset].file.filename for spec in specs)]
        fields = tuple(each.field(file) for each in found)
        digests = tuple(digest(file[each.spec.dataset], each.axis) for each in found)
    stored = StoredFile(
        path=path,
        sizes={home: os.path.getsize(home) for home in homes},
        num_rows=num_rows,
        range_rows=_range_rows(num_rows, fields, found),
        chunked=any(each.facts.chunks for each in found),
        storages=tuple(None if isinstance(place, str) else place for place in located),
        slow=tuple(place if isinstance(place, str) else "" for place in located),
        packings=tuple(each.packing for each in found),
        digests=digests,
    )
    return stored, fields


def _located(file: Any, found: FoundDataset) -> Storage | str:
    with damage_told(found.path, found.spec.dataset):
        return locate(file[found.spec.dataset], found.facts.raw, found.axis)


def _common_rows(path: str, found: Sequence[FoundDataset]) -> int:
    lengths = {each.spec.name: each.num_rows for each in found}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f'"{name}" has {length}' for name, length in lengths.items())
        raise DataError(f"{path}: the fields have different numbers of rows: {listed}; they must be equal")
    num_rows = found[0].num_rows
    if num_rows == 0:
        raise DataError(f"{path}: its datasets have no rows; leave the file out or write it again")
    return num_rows


def _range_rows(num_rows: int, fields: Sequence[Field], found: Sequence[FoundDataset]) -> int:
    """Return how many rows to read together.

    The chunks of the field with most bytes a row decide, because decoding it costs most. Small chunks are
    taken several at a time, so that a read is worth its cost, as long as enough ranges remain to be shuffled; a
    chunk that is too large to hold is read in parts, and so more than once.
    """
    row_bytes = sum(field.row_bytes for field in fields)
    both = zip(fields, found, strict=True)
    chunked = [(field.row_bytes, each.chunk_rows) for field, each in both if each.facts.chunks]
    height = max(chunked, key=lambda entry: entry[0])[1] if chunked else 1
    if height * row_bytes > _MOST_RANGE_BYTES:
        return max(1, _MOST_RANGE_BYTES // row_bytes)
    worth = _LEAST_RANGE_BYTES if chunked else _CONTIGUOUS_RANGE_BYTES
    together = min(worth // (height * row_bytes), num_rows // (height * _ENOUGH_RANGES), _ENOUGH_ROWS // height)
    return height * max(1, together, -(-num_rows // (height * _MOST_RANGES)))


def _check_same(first: tuple[Field, ...], first_path: str, found: tuple[Field, ...], path: str) -> None:
    for here, there in zip(first, found, strict=True):
        if here != there:
            raise DataError(
                f'dataset "{here.dataset}" is {here.stored} of shape {here.shape} a sample in {first_path}, but '
                f"{there.stored} of shape {there.shape} in {path}; files of one data set must agree"
            )
