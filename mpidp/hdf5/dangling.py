"""An open HDF5 file or dataset enters; what it refers to and what is not there leaves, as text.

HDF5 fills in for a missing source of a virtual dataset without a word, so only looking helps.
"""

import os
from typing import Any


def dangling_links(file: Any) -> list[tuple[str, str]]:
    """Return (path, where it leads) of every soft or external link in an open file that leads nowhere."""
    found: list[tuple[str, str]] = []

    def look(path: str, group: Any) -> None:
        for name in group:
            link = group.get(name, getlink=True)
            if hasattr(link, "path") and group.get(name) is None:  # hard links have none
                elsewhere = f" in {link.filename}" if hasattr(link, "filename") else ""
                found.append(
                    (f"{path}/{name}".strip("/"), f'is a link to "{link.path}"{elsewhere}, which is not there')
                )

    look("", file)
    file.visititems(lambda name, item: look(name, item) if hasattr(item, "visititems") else None)
    return found


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
