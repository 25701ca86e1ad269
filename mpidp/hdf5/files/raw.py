"""Values of a dataset as the bytes that they are in the file: of any type of fixed size, known to NumPy or not."""

import math
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt


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
