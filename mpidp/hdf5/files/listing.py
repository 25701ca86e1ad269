"""Enters: the path of an HDF5 file. Leaves: what a user wants to know of the file and of every dataset in it.

Unlike `describe`, which checks the datasets of a run, this reports whatever is there, trainable or not.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpidp.hdf5.files.file import Facts, inspect, open_file

_MOST_TEXT = 100


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
    """What a file holds; `attributes` are those of the file itself."""

    attributes: dict[str, str]
    datasets: tuple[DatasetInfo, ...]


def list_datasets(path: str) -> FileInfo:
    """Return what the file holds, its datasets by name; raises `DataError` if it cannot be opened."""
    with open_file(path, cache_bytes=0) as file:
        names: list[str] = []

        def visit(name: str, item: Any) -> None:
            if hasattr(item, "chunks"):  # groups and named types have none
                names.append(name)

        file.visititems(visit)
        infos = tuple(_info(file, name) for name in sorted(names))
        return FileInfo(_attributes(file), infos)


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
    return {name: _attribute_text(item, name) for name in item.attrs}


def _attribute_text(item: Any, name: str) -> str:
    try:
        value = item.attrs[name]
    except (OSError, TypeError, UnicodeDecodeError) as error:
        return f"(unreadable: {error})"
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    if isinstance(value, np.ndarray):
        text = f"{value.dtype} array of shape {value.shape}" if value.size > 8 else str(value.tolist())
    text = " ".join(text.split())
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 3]}..."
