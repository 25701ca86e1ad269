"""Fingerprints of data sets, by which a resume finds that its data has changed, and in what.

A position in an epoch means the same samples only over the same rows in the same order. Of the values a few rows at
fixed places are compared, which costs three small reads a dataset: files that were written anew are told apart, a
single value that was corrected elsewhere is not. Paths are for messages only.
"""

import hashlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mpidp.errors import DataError
from mpidp.hdf5.files.types import HDF5_ERRORS

if TYPE_CHECKING:
    from mpidp.hdf5.dataset import DataSet

log = logging.getLogger("mpidp")

Fingerprint = list[dict[str, Any]]  # a file each: plain values, which any checkpoint can hold

_PLACE_BYTES, _PLACE_ROWS = 64 * 2**10, 64
_DIGEST_BYTES = 16


def digest(dataset: Any, axis: int) -> str:
    """Return a digest of the first, middle and last rows of an open dataset; "" where h5py cannot read them."""
    try:
        return _digest(dataset, axis)
    except HDF5_ERRORS:
        return ""


def _digest(dataset: Any, axis: int) -> str:
    counts = _window(dataset.shape, axis, dataset.dtype.itemsize)
    # A sample that is too large is cut in its middle: edges are often empty.
    window = [
        slice((length - count) // 2, (length + count) // 2) for length, count in zip(dataset.shape, counts, strict=True)
    ]
    last = dataset.shape[axis] - counts[axis]
    found = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for start in sorted({0, last // 2, last}):
        window[axis] = slice(start, start + counts[axis])
        found.update(_bytes(np.asarray(dataset[tuple(window)])))
    return found.hexdigest()


def fingerprint(dataset: "DataSet") -> Fingerprint:
    """Return what a resume compares: of each file, in order, its rows, the ranges they are read in, its fields."""
    return [
        {
            "path": file.path,
            "rows": file.num_rows,
            "chunk_rows": file.range_rows,
            "fields": {
                field.name: {"dtype": str(field.stored), "shape": list(field.shape), "digest": file.digests[number]}
                for number, field in enumerate(dataset.fields)
            },
        }
        for file in dataset.files
    ]


def check_unchanged(saved: Fingerprint, dataset: "DataSet", accept_changed: bool, speaks: bool) -> bool:
    """Return whether the data are those of a saved state; raises `DataError` unless a change is accepted."""
    changed = find_change(saved, fingerprint(dataset))
    if not changed:
        return True
    if not accept_changed:
        raise DataError(
            f"the data are not those of the checkpoint: {changed}. Samples would be lost or come twice. Give the same "
            "data; or, where they were changed on purpose, set data.accept_changed = true "
            "(load_state_dict(..., accept_changed=True)): the epoch then begins anew"
        )
    if speaks:
        log.warning(
            "the data are not those of the checkpoint: %s. As accept_changed is set, the epoch begins anew, and a "
            "split may hold out other rows than before",
            changed,
        )
    return False


def find_change(saved: Fingerprint, here: Fingerprint) -> str:
    """Return the first difference between two fingerprints in words, or ""; another path is none."""
    if len(saved) != len(here):
        return f"there were {_count(len(saved), 'file')}, and now there {'is' if len(here) == 1 else 'are'} {len(here)}"
    for number, (before, now) in enumerate(zip(saved, here, strict=True), start=1):
        change = _change_of_file(before, now)
        if change and sorted(map(_content, saved)) == sorted(map(_content, here)):
            return f"the files come in another order; file {number} was {before['path']}, and now is {now['path']}"
        if change:
            moved = "" if before["path"] == now["path"] else f", where {before['path']} was"
            return f"{now['path']} (file {number} of {len(here)}{moved}) {change}"
    return ""


def _change_of_file(before: dict[str, Any], now: dict[str, Any]) -> str:
    if before["rows"] != now["rows"]:
        return f"had {before['rows']:,} rows, and now has {now['rows']:,}"
    was, fields = before["fields"], now["fields"]
    if was.keys() != fields.keys():
        return f"was read for the fields {', '.join(was)}, and now is for {', '.join(fields)}"
    for name in fields:
        for part in ("dtype", "shape"):
            if was[name][part] != fields[name][part]:
                return f'had {part} {was[name][part]} in field "{name}", and now has {fields[name][part]}'
    if before["chunk_rows"] != now["chunk_rows"]:
        return f"has other chunks: {before['chunk_rows']:,} rows were read together, and now {now['chunk_rows']:,} are"
    other = next((name for name in fields if was[name]["digest"] != fields[name]["digest"]), None)
    return "" if other is None else f'has other values in field "{other}" than before'


def _content(file: dict[str, Any]) -> str:
    return repr({key: value for key, value in file.items() if key != "path"})


def _window(shape: Sequence[int], axis: int, item_bytes: int) -> list[int]:
    """Return how many values to take along each axis: whole samples, as far as they are small."""
    counts = [1] * len(shape)
    room = max(1, _PLACE_BYTES // max(1, item_bytes))
    for place in [*(other for other in reversed(range(len(shape))) if other != axis), axis]:
        counts[place] = max(1, min(shape[place], room))
        room //= counts[place]
    counts[axis] = min(counts[axis], _PLACE_ROWS)
    return counts


def _bytes(values: npt.NDArray[Any]) -> bytes:
    """Return the values' bytes; of strings and arrays of varying length, which are pointers in memory, their text."""
    if not values.dtype.hasobject:
        return values.tobytes()
    return repr([value.tolist() if hasattr(value, "tolist") else value for value in values.ravel()]).encode()


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
