"""Enters: the path of an HDF5 file and the name of a dataset in it. Leaves: an open file, or plain facts.

The only module that imports h5py. Files are opened read-only and without locks, which many cluster file
systems do not have. What HDF5 reports as an error leaves as a `DataError` that says what to do.
"""

import errno
import math
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import h5py
import numpy as np

from mpidp.errors import DataError
from mpidp.hdf5.decode.retry import error_number, retried

with suppress(ImportError):
    import hdf5plugin  # noqa: F401  # where installed, importing it makes its filters known to HDF5

_MOST_LISTED = 20
# Chunks whose numbers share a slot push each other out: many more slots than chunks that fit, and a prime number.
_CACHE_SLOTS = 10_007


@dataclass(frozen=True)
class Facts:
    """What is known of a dataset; `shape` is None without a dataspace.

    `dtype` is that of plain numbers in native byte order, or None; `raw` is the dtype of anything of fixed
    size as it lies in the file: byte order, members of compounds, lengths of strings. bfloat16 is uint16 in both.
    """

    shape: tuple[int, ...] | None
    dtype: np.dtype[Any] | None
    raw: np.dtype[Any] | None
    bfloat16: bool
    type_name: str
    chunks: tuple[int, ...] | None
    unknown_filters: tuple[str, ...]
    unwritten: str
    elsewhere: str
    matlab_class: str


def open_file(path: str, cache_bytes: int) -> Any:
    """Return the open `h5py.File`, read-only; `cache_bytes` is the chunk cache of each dataset.

    Raises `DataError` for a file that is missing, unreadable, truncated or not HDF5.
    """
    if os.path.isdir(path):
        raise DataError(f"{path}: this is a folder; give the HDF5 files in it")
    if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe would wait for ever
        raise DataError(f"{path}: this is no regular file; give an HDF5 file")
    try:
        return retried(lambda: _open(path, cache_bytes))
    except OSError as error:
        raise DataError(f"{path}: {_open_problem(path, error)}") from error


def _open(path: str, cache_bytes: int) -> Any:
    try:
        return h5py.File(path, "r", locking=False, rdcc_nbytes=cache_bytes, rdcc_nslots=_CACHE_SLOTS)
    except OSError as error:
        if "locking flag" not in str(error):
            raise
    # The user's own program has the file open, and HDF5 wants all openings in one process to lock alike.
    return h5py.File(path, "r", rdcc_nbytes=cache_bytes, rdcc_nslots=_CACHE_SLOTS)


def inspect(file: Any, name: str) -> Facts:
    """Return the facts of dataset `name` of an open file.

    Raises `DataError` when there is no such dataset, naming those that there are.
    """
    try:
        item = file[name]
    except (KeyError, OSError, RuntimeError, ValueError) as error:
        raise DataError(f"{file.filename}: {_missing_problem(file, name, str(error))}") from error
    if not isinstance(item, h5py.Dataset):
        kind = "a group" if isinstance(item, h5py.Group) else "a named datatype"
        raise DataError(f'{file.filename}: "{name}" is {kind}, not a dataset; {_offer(file, name)}')
    raw, type_name = _type(item)
    bfloat16 = type_name == "bfloat16"
    return Facts(
        shape=item.shape,
        dtype=None if raw is None or raw.kind in "VS" else raw.newbyteorder("="),
        raw=raw,
        bfloat16=bfloat16,
        type_name=type_name,
        chunks=item.chunks,
        unknown_filters=_unknown_filters(item),
        unwritten=_unwritten(item),
        elsewhere=_elsewhere(item),
        matlab_class=_text(item.attrs["MATLAB_class"]) if "MATLAB_class" in item.attrs else "",
    )


def _open_problem(path: str, error: OSError) -> str:
    text, number = str(error), error_number(error)
    if number == errno.ENOENT:
        return "no such file; check the path, and that this node sees the file system"
    if number in (errno.EACCES, errno.EPERM):
        return "permission denied; ask its owner for read access (chmod), also to the folders above"
    if number == errno.EMFILE:
        return f"too many open files; raise the limit (ulimit -n). HDF5 says: {text}"
    sizes = re.search(r"eof = (\d+), sblock->base_addr = (\d+), stored_eof = (\d+)", text)
    if sizes:
        found, base, expected = (int(number) for number in sizes.groups())
        missing = base + expected - found
        return f"truncated, {missing} bytes are missing; copy or write it again. HDF5 says: {text}"
    if "signature not found" in text:
        with open(path, "rb") as raw:
            start = raw.read(24)
        return f"not an HDF5 file: {os.path.getsize(path)} bytes that begin with {start!r}. HDF5 says: {text}"
    if "unable to lock file" in text:
        return f"HDF5 is told to lock files, and cannot; set HDF5_USE_FILE_LOCKING=FALSE. HDF5 says: {text}"
    if "already open for write" in text:
        return f"the program that writes it did not close it; let it end, or write again. HDF5 says: {text}"
    return f"cannot be opened. HDF5 says: {text}"


def _missing_problem(file: Any, name: str, text: str) -> str:
    link = _broken_link(file, name)
    if link:
        return f'"{name}" cannot be reached: {link}'
    if "doesn't exist" in text or "not found" in text:
        return f'no dataset "{name}"; {_offer(file, name)}'
    return f'dataset "{name}" cannot be opened; the file may be damaged. HDF5 says: {text}'


def _broken_link(file: Any, name: str) -> str:
    """Return what the first external or soft link on the way to `name` points to, or "" if there is none."""
    group, way = file, ""
    for part in name.strip("/").split("/"):
        way = f"{way}/{part}"
        link = group.get(part, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            folder = os.path.dirname(file.filename)
            return (
                f'{way} is an external link to "{link.path}" in {link.filename}, which cannot be opened from '
                f"{folder}; put that file there or give its path instead"
            )
        if isinstance(link, h5py.SoftLink):
            return f'{way} is a link to "{link.path}", which does not exist'
        group = group.get(part)
        if not isinstance(group, h5py.Group):
            break
    return ""


def _offer(file: Any, name: str) -> str:
    """Return the nearest name and a list of the datasets in the file, for an error message."""
    names: list[str] = []
    listed: list[str] = []

    def visit(path: str, item: Any) -> bool | None:
        if isinstance(item, h5py.Dataset):
            names.append(path)
            listed.append(f"{path} {item.shape} {_type(item)[1]}")
        return True if len(names) > _MOST_LISTED else None

    file.visititems(visit)
    near = get_close_matches(name.strip("/"), names, n=1)
    guess = f'did you mean "{near[0]}"? ' if near else ""
    more = ", ..." if len(listed) > _MOST_LISTED else ""
    return f"{guess}The file holds: {', '.join(listed[:_MOST_LISTED]) or 'no datasets'}{more}"


def _type(dataset: Any) -> tuple[np.dtype[Any] | None, str]:
    """Return the dtype of the values on disk (None if their size varies or NumPy has none) and its name."""
    try:
        dtype = dataset.dtype
    except (TypeError, KeyError, ValueError) as error:  # KeyError: VAX byte order
        return None, f"a type without NumPy equivalent ({error!r})"
    if _is_bfloat16(dataset.id.get_type()):
        return np.dtype("u2").newbyteorder(dataset.id.get_type().dtype.byteorder), "bfloat16"
    if h5py.check_string_dtype(dtype) is not None and dtype.kind == "S":
        return dtype, f"string {dtype}"
    enum = h5py.check_enum_dtype(dtype)
    if enum is not None:
        return np.dtype(dtype.str), f"enum {dtype.str}"
    special = {
        "string of variable length": h5py.check_string_dtype,
        "variable-length array": h5py.check_vlen_dtype,
        "object or region reference": h5py.check_ref_dtype,
    }
    for type_name, check in special.items():
        if check(dtype) is not None:
            return None, type_name
    if dtype.kind == "V" and dtype.names:
        return (None if dtype.hasobject else dtype), f"compound {dtype}"
    if dtype.kind in "VOSUmM":
        return None, f"{'array' if dtype.subdtype else 'opaque' if dtype.kind == 'V' else 'special type'} {dtype}"
    return dtype, str(dtype)


def _is_bfloat16(kind: Any) -> bool:
    """Whether a type of HDF5 is bfloat16, which h5py reads as float32: the upper half of one."""
    if not isinstance(kind, h5py.h5t.TypeFloatID) or kind.get_size() != 2:
        return False
    return bool(kind.get_fields() == (15, 7, 8, 0, 7) and kind.get_ebias() == 127)


def _unknown_filters(dataset: Any) -> tuple[str, ...]:
    plist = dataset.id.get_create_plist()
    filters = [plist.get_filter(number) for number in range(plist.get_nfilters())]
    return tuple(
        f"{identifier} ({_text(label) or 'no name'})"
        for identifier, _, _, label in filters
        if not h5py.h5z.filter_avail(identifier)
    )


def _unwritten(dataset: Any) -> str:
    """Return which part of the dataset was never written, or ""; HDF5 would invent fill values for it."""
    if not dataset.shape or 0 in dataset.shape or dataset.is_virtual:
        return ""
    if dataset.chunks:
        heights = zip(dataset.shape, dataset.chunks, strict=True)
        expected = math.prod(-(-length // height) for length, height in heights)
        written = dataset.id.get_num_chunks()
        return f"{expected - written} of its {expected} chunks" if written < expected else ""
    return "" if dataset.id.get_storage_size() or dataset.external else "all of it"


def _elsewhere(dataset: Any) -> str:
    """Return where the values lie when that is not this dataset itself, or ""."""
    if dataset.is_virtual:
        sources = sorted({source.file_name for source in dataset.virtual_sources()})
        return f"a virtual dataset over {', '.join(sources)}"
    if dataset.external:
        return f"stored in other files: {', '.join(_text(entry[0]) for entry in dataset.external)}"
    return ""


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
