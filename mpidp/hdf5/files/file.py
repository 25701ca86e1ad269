"""Opening of HDF5 files and of datasets in them, basic facts of a dataset, and messages for what is not there.

Files are opened read-only and without locks, which many cluster file systems do not have. What HDF5 reports as an
error is raised as a `DataError` that says what to do.
"""

from __future__ import annotations

import errno
import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import islice
from typing import Any

import h5py
import numpy as np

from mpidp.errors import DataError
from mpidp.hdf5.decode import error_number, retried
from mpidp.hdf5.field import Packing
from mpidp.hdf5.files.types import (
    HDF5_ERRORS,
    cf_attributes,
    damage_told,
    is_dimension_only,
    small_attribute,
    stored_type,
)
from mpidp.printable import listed

with suppress(ImportError):
    import hdf5plugin  # noqa: F401  # where installed, importing it makes its filters known to HDF5

# Chunks whose numbers share a slot push each other out: many more slots than chunks that fit, and a prime number.
_CACHE_SLOTS = 10_007
_APART = "mpidp-apart"
h5py.register_driver(_APART, lambda plist: plist.set_fapl_log(b"", 0, 0))


@dataclass(frozen=True)
class Facts:
    """What is known of a dataset; `shape` is None without a dataspace.

    `dtype` is that of plain numbers in native byte order, or None; `raw`, `type_name`, `booleans` and `left_out` are
    those of its `StoredType`. `packing` is what attributes of netCDF's say, and `dimension_only` that it is a
    dimension of netCDF's, no variable. `unwritten` and `elsewhere` say which part was never written, and where the
    values lie if not in this dataset; or "".
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
    dimension_only: bool = False
    booleans: frozenset[str] = frozenset()
    left_out: dict[str, str] = field(default_factory=dict)
    packing: Packing | None = None


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


def open_apart(path: str, cache_bytes: int) -> Any:
    """Return the open file as `open_file` does, and leave the user's own program free to open it as it likes.

    All openings of a file by one driver must lock alike, and forbid writing while one of them reads. The driver "log"
    does what the usual one does, and logs nothing here. `describe`, which opened and closed the file, has made HDF5
    write what this process had not yet written.
    """
    with suppress(OSError):  # `open_file` says what is wrong, or opens what is open for writing here
        return _open(path, cache_bytes, driver=_APART)
    return open_file(path, cache_bytes)


def _open(path: str, cache_bytes: int, **options: Any) -> Any:
    try:
        return h5py.File(path, "r", locking=False, rdcc_nbytes=cache_bytes, rdcc_nslots=_CACHE_SLOTS, **options)
    except OSError as error:
        if "locking flag" not in str(error):
            raise
    # The user's own program has the file open, and HDF5 wants all openings in one process to lock alike.
    return h5py.File(path, "r", rdcc_nbytes=cache_bytes, rdcc_nslots=_CACHE_SLOTS)


def inspect(file: Any, name: str) -> Facts:
    """Return the facts of dataset `name` of an open file; raises what `find_dataset` does."""
    item = find_dataset(file, name)
    with damage_told(file.filename, name):
        return facts_of(item)


def find_dataset(file: Any, name: str) -> Any:
    """Return dataset `name` of an open file, open.

    Raises `DataError` when there is no such dataset, naming some that there are, and when it is damaged.
    """
    try:
        check_links(file, name)
        item = file[name]
    except DataError:
        raise
    except HDF5_ERRORS as error:
        with damage_told(file.filename, name):
            raise DataError(f"{file.filename}: {no_dataset(file, name, error)}") from error
    with damage_told(file.filename, name):
        if not isinstance(item, h5py.Dataset):
            raise DataError(f"{file.filename}: {other_object(file, name, item)}")
        return item


def facts_of(item: Any) -> Facts:
    """Return the facts of an open dataset; raises what h5py raises over a damaged one."""
    stored = stored_type(item.id.get_type())
    raw = stored.raw
    dtype = None if raw is None or raw.kind in "VS" else raw.newbyteorder("=")
    bfloat16 = stored.name == "bfloat16"
    has_attributes = len(item.attrs) > 0  # most have none, and each is looked up by itself
    packable = None if bfloat16 or stored.booleans or not has_attributes else dtype
    return Facts(
        shape=item.shape,
        dtype=dtype,
        raw=raw,
        bfloat16=bfloat16,
        type_name=stored.name,
        chunks=item.chunks,
        unknown_filters=_unknown_filters(item),
        unwritten=unwritten(item),
        elsewhere=_elsewhere(item),
        matlab_class=str(small_attribute(item, "MATLAB_class") or "") if has_attributes else "",
        dimension_only=has_attributes and is_dimension_only(item),
        booleans=stored.booleans,
        left_out=stored.left_out,
        packing=None if packable is None else cf_attributes(item, packable),
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


def _unknown_filters(dataset: Any) -> tuple[str, ...]:
    plist = dataset.id.get_create_plist()
    filters = [plist.get_filter(number) for number in range(plist.get_nfilters())]
    return tuple(
        f"{identifier} ({_text(label) or 'no name'})"
        for identifier, _, _, label in filters
        if not h5py.h5z.filter_avail(identifier)
    )


def unwritten(dataset: Any) -> str:
    """Return which part of the dataset was never written, or ""; HDF5 would invent fill values for it."""
    shape, chunks = dataset.shape, dataset.chunks
    if not shape or 0 in shape or dataset.is_virtual:
        return ""
    if chunks:
        expected = math.prod(-(-length // height) for length, height in zip(shape, chunks, strict=True))
        written = dataset.id.get_num_chunks()
        return f"{expected - written} of its {expected} chunks" if written < expected else ""
    return "" if dataset.id.get_storage_size() or dataset.external else "all of it"


def _elsewhere(dataset: Any) -> str:
    """Return where the values lie when that is not this dataset itself, or ""."""
    if dataset.is_virtual:
        sources = sorted({source.file_name for source in dataset.virtual_sources()})
        return f"a virtual dataset over {listed(sources)}"
    if dataset.external:
        return f"stored in other files: {listed([_text(entry[0]) for entry in dataset.external])}"
    return ""


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


_MOST_LISTED = 10
_MOST_LOOKED_AT = 2000
# So many groups that hold a dataset of one name are taken for samples.
_MANY_GROUPS = 10
_SPARSE = ("csr_matrix", "csc_matrix")


def check_links(file: Any, name: str) -> None:
    """Raise `DataError` where an external link on the way to `name` leads to a pipe, for which HDF5 waits for ever."""
    for way, link in _links(file, name):
        if not isinstance(link, h5py.ExternalLink):
            continue
        beside = os.path.join(os.path.dirname(file.filename), link.filename)
        for target in (beside, link.filename):
            if os.path.exists(target) and not os.path.isfile(target) and not os.path.isdir(target):
                raise DataError(
                    f"{file.filename}: {way} is an external link to {link.filename}, which is no regular file; "
                    "give an HDF5 file"
                )


def no_dataset(file: Any, name: str, error: Exception) -> str:
    """Return why h5py raised `error` when it was asked for `name`."""
    link = _broken_link(file, name)
    if link:
        return f'"{name}" cannot be reached: {link}'
    text = " ".join(str(error).split())
    if "doesn't exist" in text or "not found" in text:
        return f'no dataset "{name}"; {_offer(file, name)}'
    return f'dataset "{name}" cannot be opened; the file may be damaged. HDF5 says: {text}'


def other_object(file: Any, name: str, item: Any) -> str:
    """Return what `name` is, which is there but is no dataset, and what to do."""
    if not isinstance(item, h5py.Group):
        return f'"{name}" is a named datatype, not a dataset; {_offer(file, name)}'
    encoding = str(small_attribute(item, "encoding-type") or small_attribute(item, "h5sparse_format"))
    if encoding in _SPARSE or f"{encoding}_matrix" in _SPARSE:
        return (
            f'"{name}" is a sparse matrix ({encoding}, as AnnData writes it), not a dataset: its rows are no array; '
            "write it dense (toarray() of SciPy, some thousand rows at a time), as a dataset"
        )
    return f'"{name}" is a group, not a dataset; {_offer(file, name)}'


def _broken_link(file: Any, name: str) -> str:
    """Return what the first external or soft link on the way to `name` points to, or "" if there is none."""
    for way, link in _links(file, name):
        if isinstance(link, h5py.ExternalLink):
            folder = os.path.dirname(file.filename)
            return (
                f'{way} is an external link to "{link.path}" in {link.filename}, which cannot be opened from '
                f"{folder}; put that file there or give its path instead"
            )
        return f'{way} is a link to "{link.path}", which does not exist'
    return ""


def _links(file: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield each soft or external link on the way to `name`, with its place."""
    group, way = file, ""
    for part in name.strip("/").split("/"):
        way = f"{way}/{part}"
        link = group.get(part, getlink=True)
        if isinstance(link, h5py.ExternalLink | h5py.SoftLink):
            yield way, link
        if way.strip("/") != name.strip("/"):
            group = group.get(part)
            if not isinstance(group, h5py.Group):
                return


def _offer(file: Any, name: str) -> str:
    """Return the nearest name and some of the datasets in the file, for an error message."""
    found = dict(islice(_datasets(file), _MOST_LOOKED_AT))
    near = get_close_matches(name.strip("/"), found, n=1)
    guess = f'did you mean "{near[0]}"? ' if near else ""
    first = [(path if path.isprintable() else repr(path), text) for path, text in islice(found.items(), _MOST_LISTED)]
    more = ", ..." if len(found) > _MOST_LISTED else ""
    listed = ", ".join(f"{path} {text}" for path, text in first) or "no datasets"
    return f"{guess}The file holds: {listed}{more}{_stacking(file.filename, found)}"


def _stacking(path: str, names: dict[str, str]) -> str:
    """Return what to do with a file that has a group for each sample, or ""."""
    parts = [name.rpartition("/") for name in names]
    common = Counter(last for group, _, last in parts if group).most_common(1)
    if not common or common[0][1] < _MANY_GROUPS:
        return ""
    return (
        f'. Many groups have a dataset "{common[0][0]}" of their own, as if each were a sample; training needs one '
        f"dataset for each field, whose first axis counts the samples: mpidp data convert {path} NEW.h5 stacks them"
    )


def _datasets(file: Any) -> Iterator[tuple[str, str]]:
    """Yield the name of each dataset that may be a field, and its shape and type, or what is damaged."""
    waiting: list[tuple[str, Any]] = [("", file)]
    seen = {file.id}
    while waiting:
        place, group = waiting.pop(0)
        for name in _names(group):
            path = f"{place}/{name}".strip("/")
            try:
                if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                    continue
                item = group[name]
                if isinstance(item, h5py.Group):
                    if item.id not in seen and not name.startswith("_i_"):
                        seen.add(item.id)
                        waiting.append((path, item))
                elif isinstance(item, h5py.Dataset) and not is_dimension_only(item):
                    yield path, f"{item.shape} {stored_type(item.id.get_type()).name}"
            except HDF5_ERRORS as error:
                yield path, f"(damaged: {' '.join(str(error).split())})"


def _names(group: Any) -> list[str]:
    try:
        return list(group)
    except HDF5_ERRORS:  # of a group that is damaged itself; the rest of the file may be sound
        return []
