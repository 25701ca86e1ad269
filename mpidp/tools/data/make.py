"""Synthetic data that a model can learn, as the source of a conversion.

A row's values depend on the seed, the field and the row alone, so chunks and workers cannot change them.
Only raw random streams are used, which NumPy keeps the same for ever.
"""

import math
import re
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidp.errors import ConfigError
from mpidp.hdf5.plan import IntArray, check_seed, words
from mpidp.tools.data.source import Source, SourceField, Values

# Purposes of random streams; those of hdf5/plan.py are below 100.
_LABELS, _MEANS, _NOISE = 101, 102, 103
# Rows that are drawn from one stream, a number that depends on the field alone.
_BLOCK_VALUES = 1 << 14
_MEANS_KEPT = 64
# Whole-number pixels: the mean grey, and how many steps a unit of value is.
_GREY, _STEPS = 0.5, 0.125


class SyntheticSource(Source):
    """Rows whose floats and pixels scatter with unit variance around the mean pattern of their class.

    A whole-number field without a shape is the class, the same for all such fields. Others hold
    mean[class] + noise; in whole-number fields scaled to the middle of the type's range, 8 bits of it at most.
    """

    def __init__(self, fields: Sequence[str], num_rows: int, classes: int, seed: int) -> None:
        check_seed(seed)
        if num_rows < 0:
            raise ConfigError(f"--rows={num_rows}; expected 0 or more.")
        if classes < 1:
            raise ConfigError(f"--classes={classes}; expected at least 1.")
        if not fields:
            raise ConfigError("no --field was given; give at least one, such as --field=x:float32:3,32,32")
        self._num_rows, self._classes, self._seed = num_rows, classes, seed
        self._fields = tuple(_parse(text, num_rows) for text in fields)
        names = [field.name for field in self._fields]
        if len(set(names)) < len(names):
            raise ConfigError(f"--field: two fields have one name: {', '.join(names)}.")
        for field in self._fields:
            if _is_label(field) and classes - 1 > np.iinfo(field.dtype).max:
                raise ConfigError(f"--classes={classes} do not fit --field={field.name}:{field.dtype}.")

    @property
    def fields(self) -> tuple[SourceField, ...]:
        """As they were asked for."""
        return self._fields

    def take(self, names: Sequence[str], rows: IntArray) -> Values:
        """Return the rows."""
        fields = {field.name: field for field in self._fields}
        labels = self._labels(rows)
        return {
            name: labels.astype(fields[name].dtype)
            if _is_label(fields[name])
            else self._around(fields[name], labels, rows)
            for name in names
        }

    def _labels(self, rows: IntArray) -> IntArray:
        drawn = _rows_of_blocks(rows, _BLOCK_VALUES, lambda block: words(_BLOCK_VALUES, self._seed, _LABELS, block))
        return (drawn % np.uint64(self._classes)).astype(np.int64)

    def _around(self, field: SourceField, labels: IntArray, rows: IntArray) -> npt.NDArray[Any]:
        size = int(np.prod(field.shape, dtype=np.int64))
        key = zlib.crc32(field.name.encode())
        per_block = max(1, _BLOCK_VALUES // size)

        def noise(block: int) -> npt.NDArray[np.float32]:
            return _near_normal(words(per_block * size, self._seed, _NOISE, key, block)).reshape(per_block, size)

        values = _rows_of_blocks(rows, per_block, noise)
        for label in np.unique(labels).tolist():
            values[labels == label] += _mean(self._seed, key, label, size)
        return _into(values.reshape(len(rows), *field.shape), field.dtype)


def _rows_of_blocks(rows: IntArray, height: int, draw: Any) -> npt.NDArray[Any]:
    """Return the rows out of blocks of `height` rows, drawing each block that is needed once."""
    blocks, places = np.divmod(rows, height)
    needed, which = np.unique(blocks, return_inverse=True)
    parts: list[npt.NDArray[Any]] = []
    for number, block in enumerate(needed.tolist()):
        parts.append(draw(block)[places[which == number]])
    order = np.argsort(np.argsort(which, kind="stable"), kind="stable")
    return np.concatenate(parts)[order]


def _near_normal(drawn: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    """Return a value of mean 0 and variance 1 from each word: the sum of its four 16-bit parts, as good as normal.

    Sums of whole numbers are exact, so the values are the same on every machine.
    """
    parts = drawn.astype("<u8").view("<u2").reshape(-1, 4).sum(axis=1, dtype=np.int64)
    values: npt.NDArray[np.float64] = (parts * 2 - 4 * 65535) / (65536 * math.sqrt(4 / 3))
    return values.astype(np.float32)


@lru_cache(maxsize=_MEANS_KEPT)
def _mean(seed: int, key: int, label: int, size: int) -> npt.NDArray[np.float32]:
    """Return the mean pattern of a class: +1/2 or -1/2 at every place."""
    bits = words(size, seed, _MEANS, key, label) & np.uint64(1)
    return np.subtract(bits.astype(np.float32), np.float32(0.5))


def _into(values: npt.NDArray[np.float32], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the values in a field's type: bool is the sign, whole numbers are a grey of up to 8 bits."""
    if dtype.kind == "b":
        return np.greater(values, 0)
    if dtype.kind in "iu":
        top = min(255, np.iinfo(dtype).max)
        return np.asarray(np.clip(np.rint((_GREY + _STEPS * values) * top), 0, top).astype(dtype))
    return values.astype(dtype)


def _is_label(field: SourceField) -> bool:
    return field.dtype.kind in "iu" and field.shape == ()


def _parse(text: str, num_rows: int) -> SourceField:
    """Return the field that NAME:TYPE or NAME:TYPE:SIZE,SIZE means."""
    found = re.fullmatch(r"([^:]+):([a-z0-9]+)(?::(\d+(?:,\d+)*))?", text)
    try:
        dtype = np.dtype(found[2]) if found else None
    except TypeError:
        dtype = None
    shape = tuple(map(int, found[3].split(","))) if found and found[3] else ()
    if found is None or dtype is None or dtype.kind not in "biuf" or dtype.itemsize > 8 or 0 in shape:
        raise ConfigError(
            f"--field={text}; expected NAME:TYPE or NAME:TYPE:SIZE,SIZE, such as x:float32:3,32,32 or y:int64 (types "
            "are NumPy's: bool, int8 to int64, uint8 to uint64, float16 to float64)"
        )
    return SourceField(found[1].strip("/"), num_rows, shape, dtype)
