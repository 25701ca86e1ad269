"""Listing of a whole HDF5 file: datasets, links and their targets, damage, and traces of other programs.

Unlike `describe`, which checks the datasets of a run, this reports whatever is there, trainable or not.
"""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import h5py
import numpy as np

from mpidp.errors import DataError
from mpidp.hdf5.copy import identity
from mpidp.hdf5.files.file import Facts, inspect, open_file
from mpidp.hdf5.files.locate import MOST_CHUNKS
from mpidp.hdf5.files.types import HDF5_ERRORS, damage_told, is_dimension_only, small_attribute

_MOST_TEXT = 100
_MOST_LISTED = 100
_MOST_ATTRIBUTES = 20


@dataclass
class Tree:
    """What there is in a file, by path without the first slash. An object with several names is listed by the first.

    Unlike HDF5's own visit, damage to one object hides no other.

    Attributes:
        datasets: names of datasets, also of those that external links lead to.
        groups: names of groups, likewise.
        links: (path, where it leads) of soft and external links.
        dangling: (path, what is wrong) of links that lead nowhere.
        damaged: (path, what is wrong) of objects that cannot be opened.
        internal: what a dataset is that another program keeps for itself, by name; no field of a run.
        sparse: (path of a group, what it is) of sparse matrices.
        stacks: names of the groups in a group that holds many of them, in natural order, by its path.
    """

    datasets: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)
    dangling: list[tuple[str, str]] = field(default_factory=list)
    damaged: list[tuple[str, str]] = field(default_factory=list)
    internal: dict[str, str] = field(default_factory=dict)
    sparse: list[tuple[str, str]] = field(default_factory=list)
    stacks: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class DatasetInfo:
    """A dataset: its name, facts, and how it lies in the file.

    `layout` is "chunked", "contiguous", "compact" or "virtual"; `filters` are named as HDF5 names them, in
    the order of writing; `stored_bytes` is its size in the file, `raw_bytes` that of its values.
    """

    name: str
    facts: Facts
    layout: str
    filters: tuple[str, ...]
    num_chunks: int
    stored_bytes: int
    raw_bytes: int
    attributes: dict[str, str]


@dataclass(frozen=True)
class FileInfo:
    """What a file holds.

    Attributes:
        attributes: those of the file itself.
        datasets: those that are described: none that other programs keep for themselves, of groups for each sample
            only those of the first, and at most some hundred.
        num_more: how many more datasets there are.
        tree: everything by name, and what is damaged.
    """

    attributes: dict[str, str]
    datasets: tuple[DatasetInfo, ...]
    num_more: int
    tree: Tree

    @property
    def samples(self) -> tuple[DatasetInfo, ...]:
        """The described datasets that lie in a group for each sample: no fields by themselves."""
        groups = tuple(f"{each}/" for path, names in self.tree.stacks.items() for each in below(path, names))
        return tuple(info for info in self.datasets if groups and info.name.startswith(groups))


def below(path: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the full names of groups in the group `path`."""
    return tuple(f"{path}/{name}".strip("/") for name in names)


def list_datasets(path: str) -> FileInfo:
    """Return what the file holds, its datasets by name; raises `DataError` if it cannot be opened."""
    with open_file(path, cache_bytes=0) as file, damage_told(path):
        tree = walk(file)
        others = tuple(f"{each}/" for base, names in tree.stacks.items() for each in below(base, names[1:]))
        fields = [name for name in tree.datasets if name not in tree.internal]
        listed = [name for name in fields if not (others and name.startswith(others))][:_MOST_LISTED]
        infos: list[DatasetInfo] = []
        for name in listed:
            try:
                infos.append(_info(file, name))
            except DataError as error:
                tree.damaged.append((name, str(error).removeprefix(f'{path}: "{name}" ')))
            except HDF5_ERRORS as error:
                tree.damaged.append((name, f"cannot be read: {error}"))
        return FileInfo(_attributes(file), tuple(infos), len(fields) - len(listed), tree)


def _info(file: Any, name: str) -> DatasetInfo:
    dataset = file[name]
    plist = dataset.id.get_create_plist()
    filters = [plist.get_filter(number) for number in range(plist.get_nfilters())]
    return DatasetInfo(
        name=name,
        facts=inspect(file, name),
        layout=_layout(dataset),
        filters=tuple(_filter_name(label, identifier, values) for identifier, _, values, label in filters),
        num_chunks=dataset.id.get_num_chunks() if dataset.chunks else 0,
        stored_bytes=dataset.id.get_storage_size(),
        raw_bytes=(dataset.size or 0) * dataset.id.get_type().get_size(),
        attributes=_attributes(dataset),
    )


def _layout(dataset: Any) -> str:
    if dataset.is_virtual:
        return "virtual"
    if dataset.chunks:
        return "chunked"
    # Compact values lie in the object header and have no address of their own; nor have values never written.
    has_address = dataset.id.get_offset() is not None or dataset.external
    return "contiguous" if has_address or not dataset.id.get_storage_size() else "compact"


def _filter_name(label: bytes, identifier: int, values: tuple[int, ...]) -> str:
    name = label.decode(errors="replace") or f"filter {identifier}"
    return f"{name}({values[0]})" if name == "deflate" else name


def _attributes(item: Any) -> dict[str, str]:
    names = list(item.attrs)
    texts = {name: _attribute_text(item, name) for name in names[:_MOST_ATTRIBUTES]}
    return texts | ({"...": f"{len(names) - _MOST_ATTRIBUTES:,} more"} if len(names) > _MOST_ATTRIBUTES else {})


def _attribute_text(item: Any, name: str) -> str:
    try:
        value = item.attrs[name]
    except HDF5_ERRORS as error:
        return f"(unreadable: {error})"
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    if isinstance(value, np.ndarray):
        text = f"{value.dtype} array of shape {value.shape}" if value.size > 8 else str(value.tolist())
    text = " ".join(text.split())
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 3]}..."


# A group with so many groups in it is taken to hold a group for each sample.
MANY_GROUPS = 100
# No dataset that somebody means to read has more pieces; a damaged shape may have any number of them.
_MOST_MISSING, _MISSING_RATIO = 1 << 16, 1000
_MOST_BYTES = 1 << 46
_PYTABLES_INDEX = ("INDEX", "TINDEX", "DINDEX")
_SPARSE_PARTS = ("data", "indices", "indptr")


def walk(file: Any) -> Tree:
    """Return what an open file holds; external links are followed."""
    return _Walk(file).tree


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts names as people count: sample_2 before sample_10."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), part) if part.isdecimal() else (-1, part) for part in parts]


class _Walk:
    """A walk through an open file or group."""

    def __init__(self, file: Any) -> None:
        self.tree = Tree()
        self._seen = {identity(file.id)}
        self._external: list[tuple[Any, str, str]] = []
        self._group(file, "", "")
        held: list[Any] = []  # HDF5 numbers a file anew when it is opened again
        while self._external:  # after all that is here, which so has its own names
            group, name, way = self._external.pop(0)
            held.append(group.get(name))
            self._object(group, name, way, "")
        self.tree.datasets.sort()

    def _group(self, group: Any, path: str, internal: str) -> None:
        inner: list[str] = []
        for name in group:
            way = f"{path}/{name}".strip("/")
            try:
                link = group.get(name, getlink=True)
                is_here = isinstance(link, h5py.HardLink) or self._follow(group, name, way, link)
            except HDF5_ERRORS as error:
                self.tree.damaged.append((way, f"cannot be opened: {error}"))
                continue
            if is_here and self._object(group, name, way, internal):
                inner.append(name)
        if len(inner) >= MANY_GROUPS:
            self.tree.stacks[path] = sorted(inner, key=natural)

    def _object(self, group: Any, name: str, way: str, internal: str) -> bool:
        """Note what a link leads to, and all that is in it; return whether it is a group."""
        try:
            item = group[name]
            if identity(item.id) in self._seen:
                return False
            self._seen.add(identity(item.id))
            if isinstance(item, h5py.Group):
                self.tree.groups.append(way)
                self._group(item, way, internal or _internal_group(item, way, self.tree))
                return True
            if isinstance(item, h5py.Dataset):
                self.tree.datasets.append(way)
                if what := internal or ("a dimension of netCDF without a variable" if is_dimension_only(item) else ""):
                    self.tree.internal[way] = what
        except HDF5_ERRORS as error:  # what lies beside it may be sound
            self.tree.damaged.append((way, f"cannot be opened: {error}"))
        return False

    def _follow(self, group: Any, name: str, way: str, link: Any) -> bool:
        """Note where a soft or external link leads; False, since what is there has another name, or comes later."""
        if link is None:
            raise KeyError("its name is listed, but cannot be found")
        is_external = isinstance(link, h5py.ExternalLink)
        leads = f'"{link.path}"' + (f" in {link.filename}" if is_external else "")
        if group.get(name) is None:
            self.tree.dangling.append((way, f"is a link to {leads}, which is not there"))
            return False
        self.tree.links.append((way, leads))
        if is_external:
            self._external.append((group, name, way))
        return False


def _internal_group(group: Any, way: str, tree: Tree) -> str:
    if str(small_attribute(group, "CLASS")) in _PYTABLES_INDEX:
        return "part of an index of PyTables"
    encoding = small_attribute(group, "encoding-type") or small_attribute(group, "h5sparse_format")
    if not all(group.get(part, getclass=True) is h5py.Dataset for part in _SPARSE_PARTS):
        return ""
    found = (small_attribute(group, name) for name in ("shape", "h5sparse_shape"))
    shape = next((value for value in found if value is not None), None)
    size = "" if shape is None else " of " + " x ".join(str(int(length)) for length in shape)
    tree.sparse.append((way, f"a sparse matrix{size} ({encoding or 'data, indices, indptr'})"))
    return f"part of the sparse matrix {way}"


def too_large(dataset: Any) -> str:
    """Return why the shape of an open dataset cannot be right, or "": a loop over its pieces would not end."""
    if not dataset.shape or 0 in dataset.shape:
        return ""
    if dataset.chunks:
        chunks = math.prod(-(-length // side) for length, side in zip(dataset.shape, dataset.chunks, strict=True))
        there = dataset.id.get_num_chunks()
        if chunks > min(MOST_CHUNKS, _MOST_MISSING + _MISSING_RATIO * there):
            return f"its shape {dataset.shape} asks for {chunks:,} chunks; {there:,} exist"
        return ""
    declared = dataset.size * dataset.id.get_type().get_size()
    if dataset.is_virtual or dataset.external or not dataset.id.get_storage_size():
        return f"its shape {dataset.shape} asks for {declared:,} bytes" if declared >= _MOST_BYTES else ""
    there = dataset.file.id.get_filesize()
    return f"its shape {dataset.shape} asks for {declared:,} bytes, the file has {there:,}" if declared > there else ""


def virtual_gaps(dataset: Any) -> str:
    """Return what a virtual or externally stored dataset lacks, or "" (also for any other dataset)."""
    if dataset.is_virtual:
        return _lacking_sources(dataset)
    folder = os.path.dirname(os.path.abspath(dataset.file.filename))
    # As HDF5 looks for them: from the current folder, unless this variable names another.
    prefix = os.environ.get("HDF5_EXTFILE_PREFIX", "").replace("${ORIGIN}", folder)
    for name, offset, size in dataset.external or ():
        path = os.path.join(prefix, os.fsdecode(name))
        if not os.path.exists(path):
            return f"{path}, where its values lie,"
        if os.path.getsize(path) < offset + min(size, dataset.nbytes):
            return f"{path}, where its values lie, holds {os.path.getsize(path)} bytes only: the rest"
    return ""


def _lacking_sources(dataset: Any) -> str:
    folder = os.path.dirname(os.path.abspath(dataset.file.filename))
    folders = (os.environ.get("HDF5_VDS_PREFIX", "").replace("${ORIGIN}", folder), folder, "")  # HDF5's own order
    mapped = 0
    for source in dataset.virtual_sources():
        mapped += source.vspace.get_select_npoints()
        if source.file_name == ".":
            if source.dset_name not in dataset.file:
                return f'its source "{source.dset_name}"'
        elif "%b" in source.file_name:
            return f"it takes whatever files {source.file_name} there are, so that some part"
        elif not any(os.path.exists(os.path.join(each, source.file_name)) for each in folders):
            return f"its source file {source.file_name}"
    return f"{dataset.size - mapped} of its {dataset.size} values" if mapped < dataset.size else ""
