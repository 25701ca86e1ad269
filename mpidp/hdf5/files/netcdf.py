"""Enters: an object of h5py's. Leaves: what attributes of netCDF's conventions say of its values.

The conventions "CF" (cfconventions.org, 2.5.1 and 8.1) name values that are missing, and the scale and offset of
numbers that are packed in small integers.
"""

from typing import Any

import numpy as np

from mpidp.hdf5.decode.unpack import Packing

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
