"""Enters: an open dataset of h5py. Leaves: what its values are in NumPy's terms, and rows of them as HDF5 reads them.

A type that NumPy lacks, or whose values vary in length, spoils no member beside it: HDF5 reads any member alone.
"""

from dataclasses import dataclass, field
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from mpidp.hdf5.files.damage import HDF5_ERRORS
from mpidp.printable import listed

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


def read_rows(dataset: Any, member: str, axis: int, start: int, stop: int) -> npt.NDArray[Any]:
    """Return rows [start, stop) along `axis` as an array (stop - start, ...), read by HDF5.

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


def _is_bfloat16(kind: Any) -> bool:
    """Whether a type of HDF5 is bfloat16, which h5py reads as float32: the upper half of one."""
    if not isinstance(kind, h5py.h5t.TypeFloatID) or kind.get_size() != 2:
        return False
    return bool(kind.get_fields() == (15, 7, 8, 0, 7) and kind.get_ebias() == 127)
