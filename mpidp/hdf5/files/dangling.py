"""What an open HDF5 file holds: datasets, links and where they lead, what is damaged, what is kept by other programs.

HDF5 fills in for a missing source of a virtual dataset without a word, so only looking helps.
"""

import math
import os
import re
from dataclasses import dataclass, field
from typing import Any

import h5py

from mpidp.hdf5.files.damage import HDF5_ERRORS
from mpidp.hdf5.files.locate import MOST_CHUNKS
from mpidp.hdf5.files.netcdf import is_dimension_only, small_attribute

# A group with so many groups in it is taken to hold a group for each sample.
MANY_GROUPS = 100
# No dataset that somebody means to read has more pieces; a damaged shape may have any number of them.
_MOST_MISSING, _MISSING_RATIO = 1 << 16, 1000
_MOST_BYTES = 1 << 46
_PYTABLES_INDEX = ("INDEX", "TINDEX", "DINDEX")
_SPARSE_PARTS = ("data", "indices", "indptr")


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


def walk(file: Any) -> Tree:
    """Return what an open file holds; external links are followed."""
    return _Walk(file).tree


def identity(item: Any) -> tuple[int, int]:
    """Return what tells an object from any other, whatever its names: the number of its file, and where it lies."""
    info = h5py.h5o.get_info(item.id)
    return info.fileno, info.addr


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts names as people count: sample_2 before sample_10."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), part) if part.isdecimal() else (-1, part) for part in parts]


class _Walk:
    """A walk through an open file or group."""

    def __init__(self, file: Any) -> None:
        self.tree = Tree()
        self._seen = {identity(file)}
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
            if identity(item) in self._seen:
                return False
            self._seen.add(identity(item))
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
