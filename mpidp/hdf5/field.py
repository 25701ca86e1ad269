"""Fields of a batch: the user's `FieldSpec`, the shape and dtype that follow from it, and conversion to that dtype.

Values that do not fit are errors, never wrapped. Everything works on NumPy arrays; bfloat16, which NumPy lacks, is kept
as its 16 bits in uint16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidp.errors import DataError


@dataclass(frozen=True)
class Packing:
    """How the values of a dataset are packed: value * scale + offset, in `dtype`.

    Attributes:
        missing: stored values that stand for none.
        scale, offset: of the attributes scale_factor and add_offset.
        dtype: of unpacked values, "float32" or "float64".
        attributes: names of the attributes that say so.
    """

    missing: tuple[float, ...]
    scale: float
    offset: float
    dtype: str
    attributes: tuple[str, ...]

    def unpack(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the unpacked values, NaN for those that are missing."""
        wide = np.dtype(self.dtype)
        unpacked = values.astype(wide)
        if self.scale != 1.0:
            unpacked *= wide.type(self.scale)
        if self.offset != 0.0:
            unpacked += wide.type(self.offset)
        for number in self.missing:
            unpacked[values == number] = np.nan
        return unpacked


Decode = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]

BFLOAT16 = "bfloat16"
_CODES = ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
SUPPORTED = frozenset(np.dtype(code) for code in _CODES)

# torch has few operators for unsigned integers of more than 8 bits, so they are read as the next signed type.
_WIDER: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype("u2"): np.dtype("i4"),
    np.dtype("u4"): np.dtype("i8"),
    np.dtype("u8"): np.dtype("i8"),
}
# What a batch may hold: torch has these, with all their operators.
_TARGETS = {str(dtype) for dtype in SUPPORTED - _WIDER.keys()} | {BFLOAT16}


@dataclass(frozen=True)
class FieldSpec:
    """How a dataset becomes a field of the batches.

    Args:
        dataset: its name in the files.
        name: name of the field; that of the dataset (and member) where empty.
        member: a member of a compound type.
        axis: which axis counts the samples; negative from the end.
        dtype: of the tensors, such as "float32" or "bfloat16"; that of the file where empty, uint16, uint32 and
            uint64 as the next wider signed integer.
        scale: values become value * scale + offset, float32 unless `dtype` says otherwise.
        offset: see `scale`.
        decode: given an array (n, ...) of stored values, such as fixed-length strings or compounds, returns n
            numbers or arrays of one shape. It is called in threads, for any n of at least 1, before scale and
            offset. Text of varying length comes as bytes objects, opaque data as np.void.
        cf: whether the attributes `_FillValue`, `missing_value`, `scale_factor` and `add_offset` (CF conventions of
            netCDF) are honoured: unpacked floating-point values, NaN where there are none, before scale and offset.

    Raises:
        DataError: for what cannot be.

    Example:
        >>> FieldSpec("image", dtype="float32", scale=1 / 255)
    """

    dataset: str
    name: str = ""
    member: str = ""
    axis: int = 0
    dtype: str = ""
    scale: float = 1.0
    offset: float = 0.0
    decode: Decode | None = None
    cf: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", f"{self.dataset}.{self.member}" if self.member else self.dataset)
        if self.dtype and self.dtype not in _TARGETS:
            raise DataError(
                f'dtype of field "{self.name}" is "{self.dtype}"; give one of {", ".join(sorted(_TARGETS))}'
            )
        if not np.isfinite([self.scale, self.offset]).all() or self.scale == 0:
            raise DataError(
                f'field "{self.name}" has scale {self.scale} and offset {self.offset}; give finite, scale not 0'
            )
        if self.cf and (self.decode or self.member):
            raise DataError(f'field "{self.name}" has cf and decode or member; attributes describe whole datasets')
        floating = not self.dtype or self.dtype == BFLOAT16 or np.dtype(self.dtype).kind in "fc"
        if (self.rescales or self.cf) and not floating:
            raise DataError(
                f'field "{self.name}" has scale, offset or cf and dtype {self.dtype}; give a floating-point dtype'
            )

    @property
    def rescales(self) -> bool:
        """Whether values are multiplied or shifted."""
        return (self.scale, self.offset) != (1.0, 0.0)

    def settings(self) -> tuple[Any, ...]:
        """Return everything that ranks must agree on; the decode function by its name."""
        decode = self.decode and f"{self.decode.__module__}.{getattr(self.decode, '__qualname__', type(self.decode))}"
        place = (self.dataset, self.name, self.member, self.axis)
        return (*place, self.dtype, self.scale, self.offset, decode, self.cf)


Fields = Sequence[str | FieldSpec]


def field_specs(fields: Fields) -> tuple[FieldSpec, ...]:
    """Return a spec for each field; raises `DataError` unless there are some, with different names."""
    if not isinstance(fields, str):
        specs = tuple(FieldSpec(field) if isinstance(field, str) else field for field in fields)
        if specs and len({spec.name for spec in specs}) == len(specs):
            return specs
    raise DataError(f"fields is {fields!r}; give a sequence of different dataset names, such as ('x', 'y')")


@dataclass(frozen=True)
class Field:
    """A field as batches hold it: an array of `shape` for each sample.

    name: in the batches. shape: of a sample. axis: of the dataset, from 0, that counts samples.
    stored: dtype in the file (of the member, of what `decode` returns), native byte order; uint16 where
    `stored_bfloat16`, which NumPy does not know. boolean: whether stored 0 and 1 mean false and true. unpacked: dtype
    of values unpacked as attributes of the file say; empty where they are not.
    """

    name: str
    shape: tuple[int, ...]
    stored: np.dtype[Any]
    dataset: str = ""
    member: str = ""
    axis: int = 0
    target: str = ""
    scale: float = 1.0
    offset: float = 0.0
    stored_bfloat16: bool = False
    decoded: bool = False
    boolean: bool = False
    unpacked: str = ""

    @property
    def is_bfloat16(self) -> bool:
        """Whether batches hold bfloat16; `dtype`, which NumPy has to do with, is then uint16."""
        return self.target == BFLOAT16 or (not self.target and self.stored_bfloat16 and not self.rescales)

    @property
    def rescales(self) -> bool:
        """Whether values are multiplied or shifted."""
        return (self.scale, self.offset) != (1.0, 0.0)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype in memory: the target, or else `stored` (floating if rescaled, unsigned integers widened)."""
        if self.is_bfloat16:
            return np.dtype("u2")
        if self.target:
            return np.dtype(self.target)
        values = np.dtype(self.unpacked or self.stored)
        if self.rescales:
            return values if values.kind in "fc" and not self.stored_bfloat16 else np.dtype("f4")
        return np.dtype(bool) if self.boolean else _WIDER.get(values, values)

    @property
    def dtype_name(self) -> str:
        """The dtype in memory as a user would write it."""
        return BFLOAT16 if self.is_bfloat16 else str(self.dtype)

    @property
    def is_direct(self) -> bool:
        """Whether stored values in native byte order are just what batches hold."""
        plain = not (self.member or self.decoded or self.rescales or self.unpacked)
        return plain and self.dtype == self.stored and self.is_bfloat16 == self.stored_bfloat16

    @property
    def row_bytes(self) -> int:
        """Bytes of one sample in memory."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


Array = npt.NDArray[Any]


class Converter:
    """Copies stored values of one field of a file into memory of its dtype; may be used by several threads.

    `packing` is that of the file, for a field whose values are unpacked.
    """

    def __init__(self, field: Field, decode: Decode | None = None, packing: Packing | None = None) -> None:
        assert field.decoded == (decode is not None), field
        self._field = field
        self._decode = decode
        self._packing = packing if field.unpacked else None

    def __call__(self, values: Array, into: Array) -> None:
        """Fill `into` (n, *field.shape) of `field.dtype` with `values` (n, ...) as stored, any byte order.

        Raises `DataError` for values that the dtype cannot hold, and for a decode function that returns
        another shape or dtype than it did at first.
        """
        if not len(into):
            return
        field = self._field
        if field.member:
            values = values[field.member]
        if self._decode is not None:
            values = self._decoded(values)
        if field.is_direct:
            np.copyto(into, values, casting="equiv")
            return
        try:
            with np.errstate(over="raise"):
                self._change(values, into)
        except FloatingPointError as error:
            raise DataError(f"holds values that {field.dtype_name} cannot hold; give a wider dtype") from error

    def _change(self, values: Array, into: Array) -> None:
        """Fill `into`; raises FloatingPointError where a finite value would become infinite."""
        field = self._field
        if field.stored_bfloat16:
            values = widen_bfloat16(values)
        if self._packing is not None:
            values = self._packing.unpack(values)
        if field.rescales:
            values = self._rescaled(values)
        if field.is_bfloat16:
            into[...] = narrow_to_bfloat16(values)
            return
        _check_range(values, into.dtype)
        if into.dtype.kind == "b" and values.dtype.kind != "b":
            _check_boolean(values)
        np.copyto(into, values, casting="unsafe")

    def _decoded(self, values: Array) -> Array:
        assert self._decode is not None
        decoded = np.asarray(self._decode(values))
        field = self._field
        if decoded.shape != (len(values), *field.shape) or decoded.dtype.newbyteorder("=") != field.stored:
            raise DataError(
                f"decode returned {decoded.dtype} of shape {decoded.shape} for {len(values)} samples; at first it "
                f"returned {field.stored} of shape {field.shape} a sample"
            )
        return decoded

    def _rescaled(self, values: Array) -> Array:
        wide = np.dtype("f4") if self._field.is_bfloat16 else self._field.dtype
        rescaled: Array = np.multiply(values, wide.type(self._field.scale), dtype=wide, casting="unsafe")
        rescaled += wide.type(self._field.offset)
        return rescaled


def widen_bfloat16(bits: Array) -> Array:
    """Return float32 values of bfloat16 bits (uint16); exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow_to_bfloat16(values: Array) -> npt.NDArray[np.uint16]:
    """Return bfloat16 bits (uint16) of real values, by way of float32; to nearest, ties to even; NaN stays NaN.

    Raises FloatingPointError where a finite value of float32 would become infinite.
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    numbers = bits.view(np.float32)
    if (np.isfinite(numbers) & (rounded & np.uint16(0x7FFF) == 0x7F80)).any():
        raise FloatingPointError("overflow in rounding to bfloat16")
    # Rounding up could turn a NaN whose high bits are few into infinity.
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), rounded)


def _check_range(values: Array, dtype: np.dtype[Any]) -> None:
    """Raise `DataError` unless every integer of `values` fits an integer `dtype`."""
    if values.dtype.kind not in "iu" or dtype.kind not in "iu" or np.can_cast(values.dtype, dtype):
        return
    allowed = np.iinfo(dtype)
    for value in (values.min(), values.max()):
        if not allowed.min <= int(value) <= allowed.max:
            raise DataError(
                f"holds {value}, which {dtype} cannot hold; give a wider dtype, or write it as float64 or as two fields"
            )


def _check_boolean(values: Array) -> None:
    """Raise `DataError` unless all integers are 0 or 1."""
    for value in (values.min(), values.max()):
        if int(value) not in (0, 1):
            raise DataError(f"holds {value}, which is neither false (0) nor true (1); give dtype, such as uint8")


def check_castable(stored: np.dtype[Any], dtype: np.dtype[Any]) -> str:
    """Return why values of `stored` may not become `dtype`, or "": nothing loses its fraction or imaginary part."""
    order: Callable[[np.dtype[Any]], int] = lambda d: "biufc".index(d.kind)  # noqa: E731
    if dtype.kind == "b" and stored.kind != "b":
        return "numbers are not true or false"
    if dtype.kind in "iu" and order(stored) > order(np.dtype("u8")):
        return "fractions would be lost"
    if stored.kind == "c" and dtype.kind != "c":
        return "imaginary parts would be lost"
    return ""
