"""Description of the datasets of a run: from paths and fields to a checked `DataSet`; no file stays open.

Everything that can be known to be wrong with the files is said here, before training starts.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mpidp.errors import DataError
from mpidp.hdf5.dataset import DataSet, Storage, StoredFile
from mpidp.hdf5.field import SUPPORTED, Decode, Field, Fields, FieldSpec, Packing, check_castable, field_specs
from mpidp.hdf5.files.file import Facts, facts_of, find_dataset, open_file
from mpidp.hdf5.files.fingerprint import digest
from mpidp.hdf5.files.locate import locate
from mpidp.hdf5.files.types import HDF5_ERRORS, damage_text, damage_told, read_rows
from mpidp.printable import listed

if TYPE_CHECKING:
    from mpidp.world.world import World

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
        found = [_find(file, path, spec) for spec in specs]
        for each in found:
            each.check(allow_holes)
        num_rows = _common_rows(path, found)
        located = [_located(each) for each in found]
        homes = [path, *(each.item.file.filename for each in found)]
        fields = tuple(each.field() for each in found)
        digests = tuple(digest(each.item, each.axis) for each in found)
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


def _find(file: Any, path: str, spec: FieldSpec) -> FoundDataset:
    item = find_dataset(file, spec.dataset)
    with damage_told(path, spec.dataset):
        return FoundDataset(path, spec, item, facts_of(item))


def _located(found: FoundDataset) -> Storage | str:
    with damage_told(found.path, found.spec.dataset):
        return locate(found.item, found.facts.raw, found.axis)


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
    """Return how many rows to read together: some chunks of the field with most bytes a row, or part of a huge one."""
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


@dataclass(frozen=True)
class FoundDataset:
    """An open dataset `item` of a file, beside what is to become of it."""

    path: str
    spec: FieldSpec
    item: Any
    facts: Facts

    @property
    def where(self) -> str:
        """How messages begin."""
        return f'{self.path}: dataset "{self.spec.dataset}"'

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dataset, which has at least one axis."""
        if not self.facts.shape:
            kind = "has no dataspace" if self.facts.shape is None else "is a single value"
            raise DataError(f"{self.where} {kind}; give a dataset one axis of which counts the samples")
        return self.facts.shape

    @cached_property
    def axis(self) -> int:
        """The axis that counts the samples, from 0."""
        axes = len(self.shape)
        if not -axes <= self.spec.axis < axes:
            raise DataError(f"{self.where} has shape {self.shape}, so there is no axis {self.spec.axis}")
        return self.spec.axis % axes

    @property
    def num_rows(self) -> int:
        """The number of samples."""
        return self.shape[self.axis]

    @property
    def chunk_rows(self) -> int:
        """The height of a chunk along the sample axis; 1 without chunks."""
        return self.facts.chunks[self.axis] if self.facts.chunks else 1

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of a sample in the file."""
        return self.shape[: self.axis] + self.shape[self.axis + 1 :]

    @property
    def packing(self) -> Packing | None:
        """How values are packed that are to be unpacked."""
        return self.facts.packing if self.spec.cf else None

    def check(self, allow_holes: bool) -> None:
        """Raise `DataError` unless the dataset can be trained on. Warns about MATLAB."""
        facts = self.facts
        if facts.dimension_only:
            raise DataError(f"{self.where} is a dimension of netCDF without a variable, and holds no values")
        self._check_type()
        if 0 in self.row_shape:
            raise DataError(f"{self.where} has shape {self.shape}: its samples hold no values; leave this field out")
        if facts.elsewhere:
            raise DataError(
                f"{self.where} is {facts.elsewhere}; HDF5 reads a missing source as fill values without a word, "
                "so give the files that hold the values as paths, or copy them into one file"
            )
        if facts.unknown_filters:
            raise DataError(
                f"{self.where} is compressed with filter {', '.join(facts.unknown_filters)}, which this HDF5 "
                "library does not know; pip install hdf5plugin, or write it with gzip"
            )
        if facts.unwritten and not allow_holes:
            verb = "was" if facts.unwritten.startswith(("1 of ", "all of it")) else "were"
            raise DataError(
                f"{self.where}: {facts.unwritten} {verb} never written and would read as fill values; write again, or "
                "say allow_holes if that is meant"
            )
        if facts.matlab_class and self.axis == 0:
            warnings.warn(
                f"{self.where} was written by MATLAB ({facts.matlab_class}): its axes are reversed. Its shape here is "
                f"{self.shape}, and axis 0 is taken to count the samples; FieldSpec(axis=-1) takes the last",
                stacklevel=2,
            )
        if facts.packing and not (self.spec.cf or self.spec.rescales or self.spec.decode):
            warnings.warn(
                f"{self.where} has the attributes {', '.join(facts.packing.attributes)} of netCDF, and is read as "
                "it is stored. With cf=True in its FieldSpec (cf = true in a run file) values that are missing "
                "become NaN, and scale and offset are applied",
                stacklevel=2,
            )

    def field(self) -> Field:
        """Return the field; what `decode` returns is tried on its first sample."""
        spec, decoded = self.spec, self._decoded_sample()
        if decoded is None:
            assert self.facts.raw is not None
            member = self.facts.raw[spec.member] if spec.member else self.facts.raw
            stored, shape = member.base.newbyteorder("="), (*self.row_shape, *member.shape)
        else:
            stored, shape = decoded.dtype.newbyteorder("="), decoded.shape[1:]
        bfloat16 = self.facts.bfloat16 and decoded is None
        boolean = spec.member in self.facts.booleans and decoded is None
        field = Field(
            name=spec.name,
            shape=shape,
            stored=stored,
            dataset=spec.dataset,
            member=spec.member,
            axis=self.axis,
            target=spec.dtype,
            scale=spec.scale,
            offset=spec.offset,
            stored_bfloat16=bfloat16,
            decoded=decoded is not None,
            boolean=boolean,
            unpacked=self.packing.dtype if self.packing else "",
        )
        values = np.dtype("f4" if bfloat16 or field.unpacked else "?" if boolean else stored)
        reason = check_castable(values, np.dtype("f4") if field.is_bfloat16 else field.dtype)
        if reason:
            raise DataError(
                f"{self.where} holds {stored}, and dtype {spec.dtype} was asked for: {reason}; give another"
            )
        return field

    def _check_type(self) -> None:
        facts, spec = self.facts, self.spec
        names = [*((facts.raw.names or ()) if facts.raw is not None else ()), *facts.left_out]
        if spec.member and spec.member not in names:
            has = f"members {listed(names)}" if names else "no members"
            raise DataError(f'{self.where} has type {facts.type_name}, which has {has}; "{spec.member}" is not there')
        if spec.decode is not None or self._holds_numbers:
            return
        what = f"has type {facts.type_name}"
        if spec.member:
            kind = facts.left_out.get(spec.member) or facts.raw[spec.member]  # type: ignore[index]
            what = f'has a member "{spec.member}" of type {kind}'
        advice = f"name one of its members ({listed(names)}) or give" if names and not spec.member else "give"
        raise DataError(
            f"{self.where} {what}, which no tensor can hold; {advice} a FieldSpec with decode, or write it as bool, 8 "
            "to 64-bit integers, 16 to 64-bit floats or complex numbers (classes and strings as numbers)"
        )

    @property
    def _holds_numbers(self) -> bool:
        """Whether tensors can hold the values, or those of the member that is asked for."""
        raw, member = self.facts.raw, self.spec.member
        if raw is None or member in self.facts.left_out:
            return False
        return (raw[member] if member else raw).base.newbyteorder("=") in SUPPORTED

    def _decoded_sample(self) -> npt.NDArray[Any] | None:
        """Return what `decode` makes of the first sample, or None without `decode`."""
        spec = self.spec
        if spec.decode is None:
            return None
        try:
            sample = read_rows(self.item, spec.member, self.axis, 0, 1)
        except HDF5_ERRORS as error:
            text = damage_text(self.path, spec.dataset, error)
            raise DataError(f"{text}; its type is {self.facts.type_name}") from error
        try:
            decoded = np.asarray(spec.decode(sample[spec.member] if spec.member else sample))
        except Exception as error:  # whatever the user's function raises
            raise DataError(f"{self.where}: decode failed on the first sample: {error!r}") from error
        if (
            decoded.ndim == 0
            or len(decoded) != 1
            or decoded.size == 0
            or decoded.dtype.newbyteorder("=") not in SUPPORTED
        ):
            raise DataError(
                f"{self.where}: decode returned {decoded.dtype} of shape {decoded.shape} for one sample; it must "
                "return an array (1, ...) of numbers for n = 1"
            )
        return decoded


def describe_on_all_ranks(world: World, paths: Paths, specs: tuple[FieldSpec, ...], allow_holes: bool) -> DataSet:
    """Return the data set as rank 0 finds it, checked to be there on every node. Collective."""
    # The user's functions are each rank's own: they stay where they are.
    dataset = world.call_on_root(lambda: replace(describe(paths, specs, allow_holes), decoders={}))
    dataset = replace(dataset, decoders=decoders(specs))
    with world.raise_on_all_ranks("finding the data"):
        if world.local_rank == 0:
            check_present(dataset)
    return dataset
