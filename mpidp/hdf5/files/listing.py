"""Enters: the path of an HDF5 file. Leaves: what a user wants to know of the file and of every dataset in it.

Unlike `describe`, which checks the datasets of a run, this reports whatever is there, trainable or not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpidp.errors import DataError
from mpidp.hdf5.files.damage import HDF5_ERRORS, damage_told
from mpidp.hdf5.files.dangling import Tree, walk
from mpidp.hdf5.files.file import Facts, inspect, open_file

_MOST_TEXT = 100
_MOST_LISTED = 100
_MOST_ATTRIBUTES = 20


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
