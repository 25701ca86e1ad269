"""Enters: what the user wants of a dataset, what HDF5 knows of it. Leaves: a `Field`, or why there is none."""

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidp.errors import DataError
from mpidp.hdf5.decode.convert import check_castable
from mpidp.hdf5.decode.field import SUPPORTED, Field, FieldSpec
from mpidp.hdf5.decode.unpack import Packing
from mpidp.hdf5.files.damage import HDF5_ERRORS, damage_text
from mpidp.hdf5.files.file import Facts
from mpidp.hdf5.files.types import read_rows
from mpidp.printable import listed


@dataclass(frozen=True)
class FoundDataset:
    """A dataset of a file, beside what is to become of it."""

    path: str
    spec: FieldSpec
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

    def field(self, file: Any) -> Field:
        """Return the field; `file` is open, and what `decode` returns is tried on its first sample."""
        spec, decoded = self.spec, self._decoded_sample(file)
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

    def _decoded_sample(self, file: Any) -> npt.NDArray[Any] | None:
        """Return what `decode` makes of the first sample, or None without `decode`."""
        spec = self.spec
        if spec.decode is None:
            return None
        try:
            sample = read_rows(file[spec.dataset], spec.member, self.axis, 0, 1)
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
