"""Conversion of stored values to the dtype of batches; values that do not fit are errors, never wrapped.

Works on NumPy arrays; bfloat16, which NumPy lacks, is kept as its 16 bits in uint16.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidp.errors import DataError
from mpidp.hdf5.field import Decode, Field, Packing

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
