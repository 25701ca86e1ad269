"""Types, attributes and values of an open dataset as NumPy has them.

Members of a compound are read one by one, so a member of a type that NumPy lacks, or that varies in length, does not
affect the others.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from mpidp.errors import DataError, MpidpError
from mpidp.hdf5.field import Packing
from mpidp.printable import listed

# What h5py raises for damaged files: impossible sizes, names that are not text, unknown types, broken references.
HDF5_ERRORS = (ArithmeticError, LookupError, MemoryError, OSError, RuntimeError, SystemError, TypeError, ValueError)


def damage_text(path: str, name: str, error: BaseException) -> str:
    """Return one line that names the object of which h5py raised `error`."""
    place = f'{path}: "{name}"' if name else path
    said = " ".join(str(error).split()) or type(error).__name__
    return f"{place} cannot be read; the file may be damaged. HDF5 says: {said}"


@contextmanager
def damage_told(path: str, name: str = "") -> Iterator[None]:
    """Raise `DataError` with `damage_text` for what h5py raises in the block; errors of this package pass."""
    try:
        yield
    except MpidpError:
        raise
    except HDF5_ERRORS as error:
        raise DataError(damage_text(path, name, error)) from error


_SPECIAL = {
    "string of variable length": h5py.check_string_dtype,
    "variable-length array": h5py.check_vlen_dtype,
    "object or region reference": h5py.check_ref_dtype,
}


@dataclass(frozen=True)
class StoredType:
    """The type of stored values.

    Attributes:
        raw: dtype of what has a fixed size, as it lies in the file: byte order, members of compounds, lengths of
            strings; None otherwise. bfloat16 is uint16. Members that have none are left out, and the others are then
            as HDF5 gives them, one after another.
        name: what a user calls it.
        booleans: what is true or false though its bits are a number's: members by name, "" is the whole.
        left_out: by name, the types of members that are not in `raw`.
    """

    raw: np.dtype[Any] | None
    name: str
    booleans: frozenset[str] = frozenset()
    left_out: dict[str, str] = field(default_factory=dict)


def stored_type(kind: Any) -> StoredType:
    """Return what NumPy makes of a type of HDF5."""
    try:
        dtype = kind.dtype
    except HDF5_ERRORS:  # H5T_TIME, the byte order of the VAX, or a compound with such a member
        if isinstance(kind, h5py.h5t.TypeCompoundID):
            return _compound(kind, None)
        is_time = kind.get_class() == h5py.h5t.TIME
        return StoredType(None, "H5T_TIME" if is_time else "that NumPy does not know")
    if _is_bfloat16(kind):
        return StoredType(np.dtype("u2").newbyteorder(dtype.byteorder), "bfloat16")
    if h5py.check_string_dtype(dtype) is not None and dtype.kind == "S":
        return StoredType(dtype, f"string {dtype}")
    enum = h5py.check_enum_dtype(dtype)
    if enum is not None:
        return StoredType(np.dtype(dtype.str), f"enum {dtype.str}", _whole(set(enum.values()) == {0, 1}))
    for name, check in _SPECIAL.items():
        if check(dtype) is not None:
            return StoredType(None, name)
    if dtype.kind == "V" and dtype.names:
        return _compound(kind, dtype)
    if dtype.subdtype:
        element = stored_type(kind.get_super())
        raw = None if element.raw is None else np.dtype((element.raw, dtype.shape))
        return StoredType(raw, f"array of {element.name} of shape {dtype.shape}", element.booleans)
    if dtype.kind in "VOSUmM":
        return StoredType(None, f"{'opaque' if dtype.kind == 'V' else 'special type'} {dtype}")
    # PyTables, which most such files are of, stores booleans as bit fields of one byte.
    return StoredType(dtype, str(dtype), _whole(isinstance(kind, h5py.h5t.TypeBitfieldID) and dtype.itemsize == 1))


def _whole(is_boolean: bool) -> frozenset[str]:
    return frozenset({""}) if is_boolean else frozenset()


def _compound(kind: Any, dtype: np.dtype[Any] | None) -> StoredType:
    """Return the type of a compound; `dtype` is None where h5py has none for the whole of it."""
    kinds = {kind.get_member_name(n).decode(): kind.get_member_type(n) for n in range(kind.get_nmembers())}
    members = {name: stored_type(member) for name, member in kinds.items()}
    left_out = {name: member.name for name, member in members.items() if member.raw is None or member.left_out}
    complete = dtype is not None and not left_out
    raw = dtype if complete else np.dtype([(name, kinds[name].dtype) for name in members if name not in left_out])
    text = listed([f"{name} {member.name}" for name, member in members.items()])
    booleans = frozenset(name for name, member in members.items() if "" in member.booleans)
    return StoredType(raw, f"compound ({text})", booleans, left_out)


def is_complete(kind: Any, dtype: np.dtype[Any]) -> bool:
    """Whether `dtype`, the `raw` of this type, has all members of a compound."""
    return not isinstance(kind, h5py.h5t.TypeCompoundID) or not dtype.names or kind.get_nmembers() == len(dtype.names)


def _is_bfloat16(kind: Any) -> bool:
    """Whether a type of HDF5 is bfloat16, which h5py reads as float32: the upper half of one."""
    if not isinstance(kind, h5py.h5t.TypeFloatID) or kind.get_size() != 2:
        return False
    return bool(kind.get_fields() == (15, 7, 8, 0, 7) and kind.get_ebias() == 127)


_MOST_ATTRIBUTE_BYTES = 4096
_DIMENSION_ONLY = "This is a netCDF dimension but not a netCDF variable"
_MISSING = ("_FillValue", "missing_value")
_SCALING = {"scale_factor": 1.0, "add_offset": 0.0}


def small_attribute(item: Any, name: str) -> Any:
    """Return an attribute of a few values, text as str; None if there is none or it is large."""
    if name not in item.attrs or item.attrs.get_id(name).get_storage_size() > _MOST_ATTRIBUTE_BYTES:
        return None
    value = item.attrs[name]
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def is_dimension_only(dataset: Any) -> bool:
    """Whether a dataset only stands for a dimension of netCDF's that has no variable: it holds no values."""
    return "CLASS" in dataset.attrs and str(small_attribute(dataset, "NAME")).startswith(_DIMENSION_ONLY)


def cf_attributes(dataset: Any, dtype: np.dtype[Any]) -> Packing | None:
    """Return how the values of a dataset, `dtype` in the file, are packed, or None where nothing says so."""
    if dtype.kind not in "iuf":
        return None
    found = {name: _numbers(small_attribute(dataset, name)) for name in (*_MISSING, *_SCALING)}
    found = {name: numbers for name, numbers in found.items() if numbers is not None}
    missing = [number for name in _MISSING if name in found for number in found[name].tolist()]
    scale, offset = (float(found.get(name, [default])[0]) for name, default in _SCALING.items())
    numbers = tuple(dict.fromkeys(number for number in missing if number == number))  # NaN is missing as it is
    if not numbers and (scale, offset) == (1.0, 0.0):
        return None
    of_attributes = [found[name].dtype for name in _SCALING if name in found and found[name].dtype.kind == "f"]
    return Packing(numbers, scale, offset, _unpacked(dtype, of_attributes), tuple(found))


def _unpacked(dtype: np.dtype[Any], of_attributes: list[np.dtype[Any]]) -> str:
    """Return the dtype of unpacked values: that of scale and offset, but float32 cannot hold integers of 32 bits."""
    widest = max((each.itemsize for each in of_attributes), default=dtype.itemsize if dtype.kind == "f" else 4)
    return "float64" if widest > 4 or (dtype.kind in "iu" and dtype.itemsize > 2) else "float32"


def _numbers(value: Any) -> Any:
    numbers = np.atleast_1d(np.asarray(value)) if value is not None else np.empty(0)
    return numbers.ravel() if numbers.dtype.kind in "iuf" and numbers.size else None


def raw_block(dataset: Any, start: tuple[int, ...], count: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return a block of an open dataset as an array of `count` opaque values; raises what HDF5 raises."""
    kind = dataset.id.get_type()
    values = np.empty(count, np.dtype((np.void, kind.get_size())))
    if math.prod(count):
        space = dataset.id.get_space()
        if count:
            space.select_hyperslab(start, count)
        memory = h5py.h5s.create_simple(count) if count else h5py.h5s.create(h5py.h5s.SCALAR)
        dataset.id.read(memory, space, values, mtype=kind)
    return values


def fill_bytes(dataset: Any) -> bytes:
    """Return the bytes of the fill value that a user gave an open dataset; b"" for zeros."""
    properties = dataset.id.get_create_plist()
    try:
        if properties.fill_value_defined() != h5py.h5d.FILL_VALUE_USER_DEFINED:
            return b""
        value = np.zeros((), dataset.dtype)
        properties.get_fill_value(value)
    except (TypeError, RuntimeError):  # NumPy has no such type, or HDF5 does not convert to it
        return b""
    return value.tobytes() if value.itemsize == dataset.id.get_type().get_size() else b""


def read_rows(dataset: Any, member: str, axis: int, start: int, stop: int) -> npt.NDArray[Any]:
    """Return rows [start, stop) along `axis` of an open dataset as an array (stop - start, ...), read by HDF5.

    With `member`, it has that member of a compound only.
    """
    if not member:
        return np.moveaxis(dataset[(slice(None),) * axis + (slice(start, stop),)], axis, 0)
    kind = dataset.id.get_type()
    dtype = np.dtype([(member, kind.get_member_type(kind.get_member_index(member.encode())).dtype)])
    begin, shape = [0] * len(dataset.shape), list(dataset.shape)
    begin[axis], shape[axis] = start, stop - start
    values = np.zeros(shape, dtype)  # zeros: where values vary in length they are objects
    space = dataset.id.get_space()
    space.select_hyperslab(tuple(begin), tuple(shape))
    memory = h5py.h5s.create_simple(tuple(shape))
    dataset.id.read(memory, space, values, h5py.h5t.py_create(dtype))
    return np.moveaxis(values, axis, 0)
