"""Messages for a name that leads to no dataset of an HDF5 file: the reason, and what there is instead."""

import os
from collections import Counter
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import islice
from typing import Any

import h5py

from mpidp.errors import DataError
from mpidp.hdf5.files.types import HDF5_ERRORS, is_dimension_only, small_attribute, stored_type

_MOST_LISTED = 10
_MOST_LOOKED_AT = 2000
# So many groups that hold a dataset of one name are taken for samples.
_MANY_GROUPS = 10
_SPARSE = ("csr_matrix", "csc_matrix")


def check_links(file: Any, name: str) -> None:
    """Raise `DataError` where an external link on the way to `name` leads to what is no regular file.

    HDF5 would open a pipe, and wait for ever.
    """
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
    """Yield the name of each dataset that may be a field, and its shape and type; groups are searched in turn.

    What is damaged is named as that. Links are not followed, and PyTables' indices are left out.
    """
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
