"""Names, shapes and values enter; encoded chunks and finished HDF5 files leave.

The only module that writes HDF5. Chunks are encoded by HDF5's own filters, in a file that exists in memory only, so
that many processes can encode at once; `write_file` then lays the encoded bytes into the real file unchanged.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from mpidp.errors import DataError
from mpidp.hdf5.write.write_filters import Filters, creation_arguments

# HDF5 keeps the size of a chunk in 32 bits.
MOST_CHUNK_BYTES = 2**32 - 1
_MEMORY_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class NewDataset:
    """A dataset to be written: `shape` with the rows first, and rows in chunks of `chunk_rows`."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_rows: int
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EncodedChunk:
    """A chunk as it will lie in the file: its dataset, first row, filter mask (a bit for a skipped filter), bytes."""

    dataset: int
    start: int
    filter_mask: int
    data: bytes


@dataclass(frozen=True)
class Template:
    """An HDF5 file to copy from: attributes and groups, and the datasets of `as_they_are` whole.

    `datasets` are the names of those that are written anew and get their attributes from here.
    """

    path: str
    datasets: tuple[str, ...]
    as_they_are: tuple[str, ...]


def encode(values: npt.NDArray[Any], new: NewDataset, filters: Filters) -> list[tuple[int, bytes]]:
    """Return (filter mask, bytes) of each chunk of `values`, whose first row must start a chunk. In any process."""
    if not len(values):
        return []
    arguments = {"driver": "core", "backing_store": False, "block_size": _MEMORY_BLOCK_BYTES}
    with h5py.File("chunks of mpidp, in memory", "w", **arguments) as file:
        dataset = _create(file, "values", values.shape, new, filters, is_open_ended=True)
        dataset[...] = values
        file.flush()
        rest = (0,) * (values.ndim - 1)
        starts = range(0, len(values), new.chunk_rows)
        return [dataset.id.read_direct_chunk((start, *rest)) for start in starts]


def write_file(
    path: str,
    datasets: Sequence[NewDataset],
    filters: Filters,
    chunks: Iterable[EncodedChunk],
    texts: Mapping[str, Sequence[str]],
    template: Template | None = None,
) -> None:
    """Write a new HDF5 file from encoded chunks and flush it to the disk; what `path` held is lost.

    `texts` become datasets of strings. Raises `DataError` when HDF5 cannot write it.
    """
    try:
        with h5py.File(path, "w", locking=False) as file:
            made = [_create(file, new.name, new.shape, new, filters, is_open_ended=False) for new in datasets]
            for chunk in chunks:
                target = made[chunk.dataset]
                place = (chunk.start, *(0,) * (len(target.shape) - 1))
                target.id.write_direct_chunk(place, chunk.data, chunk.filter_mask)
            for new, dataset in zip(datasets, made, strict=True):
                dataset.attrs.update(new.attributes)
            for name, lines in texts.items():
                file.create_dataset(name, data=list(lines), dtype=h5py.string_dtype())
            if template is not None:
                _copy_from(template, file)
        with open(path, "rb") as written:
            os.fsync(written.fileno())
    except OSError as error:
        raise DataError(f"{path}: cannot be written; check the space that is left there. {error}") from error


def skipped_attributes(item: Any) -> list[str]:
    """Return the names of the attributes that a copy cannot keep: references point into the file they are in."""
    return [name for name in item.attrs if _holds_reference(item.attrs.get_id(name).dtype)]


def holds_references(dataset: Any) -> bool:
    """Return whether the values of an open dataset are references to objects or regions of their own file."""
    return _holds_reference(dataset.id.dtype)


def _holds_reference(dtype: np.dtype[Any]) -> bool:
    inner = h5py.check_vlen_dtype(dtype)
    parts = [dtype[name] for name in dtype.names] if dtype.names else []
    parts += [np.dtype(inner)] if inner is not None else []
    parts += [dtype.subdtype[0]] if dtype.subdtype else []
    return h5py.check_ref_dtype(dtype) is not None or any(map(_holds_reference, parts))


def _create(
    file: Any, name: str, shape: tuple[int, ...], new: NewDataset, filters: Filters, is_open_ended: bool
) -> Any:
    """Create a dataset without values; only an open-ended one may be shorter than its chunk."""
    rows = None if is_open_ended or shape[0] < new.chunk_rows else shape[0]
    return file.create_dataset(
        name,
        shape,
        new.dtype,
        chunks=(new.chunk_rows, *shape[1:]),
        maxshape=(rows, *shape[1:]),
        fletcher32=filters.fletcher32,
        **creation_arguments(filters),
    )


def _copy_from(template: Template, file: Any) -> None:
    with h5py.File(template.path, "r", locking=False) as source:
        for name in template.as_they_are:
            source.copy(source[name], file, name)
        for name in template.datasets:
            _copy_attributes(source[name], file[name])
        _copy_attributes(source, file)
        groups: list[str] = []
        source.visititems(lambda name, item: groups.append(name) if isinstance(item, h5py.Group) else None)
        for name in groups:
            if name in file:  # a group of which nothing was taken is left out
                _copy_attributes(source[name], file[name])


def _copy_attributes(source: Any, target: Any) -> None:
    skipped = skipped_attributes(source)
    for name in source.attrs:
        if name not in skipped:
            target.attrs[name] = source.attrs[name]
