"""An open HDF5 file or dataset enters; what is there leaves, and what it refers to that is not.

HDF5 fills in for a missing source of a virtual dataset without a word, so only looking helps.
"""

import os
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tree:
    """What there is in a file: names of datasets, and (path, what is wrong) of links that lead nowhere or to damage.

    An object with several names is listed by the first. Unlike HDF5's own visit, damage to one object hides no other.
    """

    datasets: list[str] = field(default_factory=list)
    dangling: list[tuple[str, str]] = field(default_factory=list)
    damaged: list[tuple[str, str]] = field(default_factory=list)


def walk(file: Any) -> Tree:
    """Return what an open file holds."""
    tree = Tree()
    _walk(file, "", tree, {file.id})
    return tree


def _walk(group: Any, path: str, tree: Tree, seen: set[Any]) -> None:
    for name in group:
        way = f"{path}/{name}".strip("/")
        link = group.get(name, getlink=True)
        if hasattr(link, "path"):  # hard links have none
            if group.get(name) is None:
                elsewhere = f" in {link.filename}" if hasattr(link, "filename") else ""
                tree.dangling.append((way, f'is a link to "{link.path}"{elsewhere}, which is not there'))
            continue
        try:
            item = group[name]
            if item.id in seen:
                continue
            seen.add(item.id)
            if hasattr(item, "visititems"):
                _walk(item, way, tree, seen)
            elif hasattr(item, "chunks"):
                tree.datasets.append(way)
        except (OSError, RuntimeError, KeyError) as error:
            tree.damaged.append((way, f"cannot be opened: {error}"))


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
