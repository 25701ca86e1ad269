"""Writing of new HDF5 files, from encoded chunks or row by row.

Chunks are encoded outside of the file that they are for, so that several threads can do it at once; `write_file` lays
the encoded bytes into it unchanged. `NewRows` writes rows as they are, one after another.
"""

import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from mpidp.errors import ConfigError, DataError
from mpidp.hdf5.copy import Template, TreeCopy, link_name


@dataclass(frozen=True)
class Filters:
    """How chunks are written.

    Attributes:
        compression: "none", "gzip", "lzf", "zstd", "lz4", "blosc-lz4", "blosc-zstd" or "blosc-blosclz".
        level: the compressor's level; None for its default.
        shuffle: bytes of equal significance are put together first, which lets numbers be compressed better.
        fletcher32: each chunk ends with a checksum, which HDF5 checks whenever it reads the chunk.
    """

    compression: str = "gzip"
    level: int | None = 4
    shuffle: bool = True
    fletcher32: bool = False

    def __str__(self) -> str:
        level = "" if self.level is None else f":{self.level}"
        return " ".join(
            [f"{self.compression}{level}", *["shuffle"] * self.has_shuffle, *["fletcher32"] * self.fletcher32]
        )

    @property
    def has_shuffle(self) -> bool:
        """Whether bytes are shuffled: that alone would cost time and gain nothing."""
        return self.shuffle and self.compression != "none"


# Name -> (lowest level, highest level), None where there are no levels.
LEVELS: dict[str, tuple[int, int] | None] = {
    "none": None,
    "gzip": (0, 9),
    "lzf": None,
    "zstd": (1, 22),
    "lz4": None,
    "blosc-lz4": (0, 9),
    "blosc-zstd": (0, 9),
    "blosc-blosclz": (0, 9),
}
_DEFAULT_LEVELS = {"gzip": 4, "zstd": 3, "blosc-lz4": 5, "blosc-zstd": 5, "blosc-blosclz": 5}


def parse_filters(text: str, shuffle: bool, fletcher32: bool) -> Filters:
    """Return the filters that NAME or NAME:LEVEL means; raises `ConfigError` for what is not known or not installed."""
    name, colon, level_text = text.partition(":")
    if name not in LEVELS:
        raise ConfigError(f"--compression={text}; known are {', '.join(LEVELS)}, some with :LEVEL as in gzip:4.")
    levels = LEVELS[name]
    level = _DEFAULT_LEVELS.get(name)
    if colon:
        if levels is None:
            raise ConfigError(f"--compression={text}: {name} has no levels; write --compression={name}.")
        if not level_text.isdecimal() or not levels[0] <= int(level_text) <= levels[1]:
            raise ConfigError(f"--compression={text}; expected a level from {levels[0]} to {levels[1]}.")
        level = int(level_text)
    filters = Filters(name, level, shuffle, fletcher32)
    creation_arguments(filters)
    return filters


def creation_arguments(filters: Filters) -> dict[str, Any]:
    """Return h5py's arguments for the filters; raises `ConfigError` where hdf5plugin is needed and missing."""
    name, level = filters.compression, filters.level
    if name == "none":
        return {}
    if name in ("gzip", "lzf"):
        return {"compression": name, "compression_opts": level, "shuffle": filters.has_shuffle}
    try:
        import hdf5plugin
    except ImportError as error:
        raise ConfigError(
            f"--compression={name} needs the package hdf5plugin: pip install hdf5plugin, or use gzip."
        ) from error
    arguments: dict[str, Any] = {} if level is None else {"clevel": level}
    if name.startswith("blosc-"):  # which shuffles by itself
        arguments["cname"] = name.removeprefix("blosc-")
        arguments["shuffle"] = hdf5plugin.Blosc.SHUFFLE if filters.has_shuffle else hdf5plugin.Blosc.NOSHUFFLE
        return dict(hdf5plugin.Blosc(**arguments))
    chosen = hdf5plugin.Zstd(**arguments) if name == "zstd" else hdf5plugin.LZ4(**arguments)
    return {**chosen, "shuffle": filters.has_shuffle}


# HDF5 keeps the size of a chunk in 32 bits.
MOST_CHUNK_BYTES = 2**32 - 1
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class NewDataset:
    """A dataset to be written: `shape` with the rows first, and rows in chunks of `chunk_rows`.

    `like` is the dataset of the template, "" without one, that its type, fill value and attributes are those of;
    `dtype` has only to be of the same size. The last chunk is filled up with `fill`, a value's bytes, or with zeros.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_rows: int
    type_name: str = ""
    like: str = ""
    fill: bytes = b""


@dataclass(frozen=True)
class EncodedChunk:
    """A chunk as it will lie in the file: its dataset, first row, filter mask (a bit for a skipped filter), bytes."""

    dataset: int
    start: int
    filter_mask: int
    data: bytes


def encode(values: npt.NDArray[Any], new: NewDataset, filters: Filters) -> list[tuple[int, bytes]]:
    """Return (filter mask, bytes) of each chunk of `values`, whose first row must start a chunk. In any thread."""
    values = _filled_up(values, new)
    if filters.compression not in ("none", "gzip") or filters.fletcher32:
        return _encode_by_hdf5(values, new, filters)
    chunks = (values[start : start + new.chunk_rows] for start in range(0, len(values), new.chunk_rows))
    return [(0, _encode(np.ascontiguousarray(chunk), filters)) for chunk in chunks]


def write_file(
    path: str,
    datasets: Sequence[NewDataset],
    filters: Filters,
    chunks: Iterable[EncodedChunk],
    texts: Mapping[str, Sequence[str]],
    template: Template | None = None,
    remark: Callable[[str], None] = lambda text: None,
) -> None:
    """Write a new HDF5 file from encoded chunks and flush it to the disk.

    `texts` become datasets of strings; all that a template holds besides `datasets` is copied first, and `remark` is
    told what cannot be. Raises `DataError` when HDF5 cannot write it.
    """
    # Attributes over 64 KiB need object headers of HDF5 1.8 or later.
    versions = ("v108", "latest") if template else None
    try:
        with h5py.File(path, "w", locking=False, libver=versions) as file:
            made = _copied(template, file, datasets, filters, remark) if template else {}
            for new in datasets:
                if new.name not in made:
                    made[new.name] = _create(file, new, filters)
            for chunk in chunks:
                target = made[datasets[chunk.dataset].name]
                place = (chunk.start, *(0,) * (len(target.shape) - 1))
                target.id.write_direct_chunk(place, chunk.data, chunk.filter_mask)
            for name, lines in texts.items():
                file.create_dataset(name, data=list(lines), dtype=h5py.string_dtype())
        with open(path, "rb") as written:
            os.fsync(written.fileno())
    except OSError as error:
        raise _not_written(path, error) from error


def _copied(
    template: Template, file: Any, datasets: Sequence[NewDataset], filters: Filters, remark: Callable[[str], None]
) -> dict[str, Any]:
    """Copy what a template holds; return the datasets to be written anew, by name."""
    by_name = {new.name: new for new in datasets}
    made: dict[str, Any] = {}

    def create(item: Any, way: str, into: Any, name: str) -> Any:
        made[way] = _create_like(item, copy.type_of(item.id.get_type()), into, name, by_name[way], filters)
        return made[way]

    copy = TreeCopy(template, file, create)
    copy.run()
    for new in datasets:  # those that are put together of several
        if new.name not in made:
            parent, _, name = new.name.rpartition("/")
            item, into = template.file[new.like], file.require_group(f"/{parent}")
            made[new.name] = _create_like(item, copy.type_of(item.id.get_type()), into, name, new, filters)
    for text in copy.remarks:
        remark(text)
    return made


def _create(file: Any, new: NewDataset, filters: Filters) -> Any:
    """Create a dataset without values."""
    return file.create_dataset(
        new.name,
        new.shape,
        new.dtype,
        chunks=(new.chunk_rows, *new.shape[1:]),
        maxshape=(None if new.shape[0] < new.chunk_rows else new.shape[0], *new.shape[1:]),
        fletcher32=filters.fletcher32,
        **creation_arguments(filters),
    )


def _create_like(item: Any, kind: Any, into: Any, name: str, new: NewDataset, filters: Filters) -> Any:
    """Create a dataset without values: of type `kind`, and with the properties of `item` but for chunks and filters."""
    with _in_memory() as file:
        filtered = _create(file, replace(new, name="values"), filters).id.get_create_plist()
    properties = item.id.get_create_plist()
    if item.external:  # which no property list can be made to forget
        properties = filtered
    else:
        properties.remove_filter(h5py.h5z.FILTER_ALL)
        properties.set_chunk(filtered.get_chunk())
        for number in range(filtered.get_nfilters()):
            identifier, flags, values, _ = filtered.get_filter(number)
            properties.set_filter(identifier, flags, values)
        properties.set_alloc_time(h5py.h5d.ALLOC_TIME_INCR)
    most = item.maxshape if item.shape == new.shape else new.shape
    unlimited = tuple(h5py.h5s.UNLIMITED if length is None else length for length in most)
    space = h5py.h5s.create_simple(new.shape, unlimited)
    text, link_list = link_name(name)
    return h5py.Dataset(h5py.h5d.create(into.id, text, kind, space, properties, link_list))


def _in_memory() -> Any:
    name = f"chunks of mpidp, in memory, {threading.get_ident()}"  # HDF5 takes files of one name for one
    return h5py.File(name, "w", driver="core", backing_store=False, block_size=_BLOCK_BYTES)


def _filled_up(values: npt.NDArray[Any], new: NewDataset) -> npt.NDArray[Any]:
    """Return the values with rows of fill values after them, up to the end of the last chunk."""
    missing = -len(values) % new.chunk_rows
    if not missing:
        return values
    whole = np.zeros((len(values) + missing, *values.shape[1:]), values.dtype)
    whole[: len(values)] = values
    if new.fill:
        whole[len(values) :] = np.frombuffer(new.fill, values.dtype)[0]
    return whole


def _encode(chunk: npt.NDArray[Any], filters: Filters) -> bytes:
    """Return a chunk as the filters shuffle and deflate of HDF5 make it; zlib releases Python's lock meanwhile."""
    if filters.compression == "none":
        return chunk.tobytes()
    data = chunk.reshape(-1).view(np.uint8)
    if filters.has_shuffle and chunk.dtype.itemsize > 1:
        data = np.ascontiguousarray(data.reshape(-1, chunk.dtype.itemsize).T)
    return zlib.compress(data.data, -1 if filters.level is None else filters.level)


def _encode_by_hdf5(values: npt.NDArray[Any], new: NewDataset, filters: Filters) -> list[tuple[int, bytes]]:
    """Encode in a file that exists in memory only: for other filters, which run one at a time under HDF5's lock."""
    with _in_memory() as file:
        dataset = _create(file, replace(new, name="values", shape=values.shape), filters)
        dataset[...] = values
        file.flush()
        rest = (0,) * (values.ndim - 1)
        return [dataset.id.read_direct_chunk((start, *rest)) for start in range(0, len(values), new.chunk_rows)]


class NewRows:
    """A new HDF5 file with one dataset, whose rows are written in their order, without chunks and filters.

    Args:
        path: of the file; what is there is replaced.
        name: of the dataset.
        shape: of the dataset, the rows first.
        dtype: of the dataset.
        attributes: of the dataset: texts, numbers and lists of these.

    Raises:
        DataError: HDF5 cannot write it; so do the methods.
    """

    def __init__(
        self, path: str, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], attributes: Mapping[str, Any]
    ) -> None:
        self._path, self._done = path, 0
        with self._as_data_error():
            self._file = h5py.File(path, "w", locking=False, libver=("v108", "latest"))  # for long attributes
            self._dataset = self._file.create_dataset(name, shape, dtype)
            for key, value in attributes.items():
                self._dataset.attrs[key] = value

    def append(self, rows: npt.NDArray[Any]) -> None:
        """Write the next rows."""
        if rows.shape[1:] != self._dataset.shape[1:] or rows.dtype != self._dataset.dtype:
            raise DataError(
                f"{self._path}: rows {rows.shape[1:]} {rows.dtype} follow rows {self._dataset.shape[1:]} "
                f"{self._dataset.dtype}; a dataset has rows of one shape and dtype"
            )
        with self._as_data_error():
            self._dataset[self._done : self._done + len(rows)] = rows
        self._done += len(rows)

    def close(self) -> None:
        """Flush the file to the disk; raises `DataError` if rows are missing."""
        if self._done != len(self._dataset):
            raise DataError(f"{self._path}: {self._done} rows were written of {len(self._dataset)}")
        with self._as_data_error():
            self._file.close()
            with open(self._path, "rb") as written:
                os.fsync(written.fileno())

    @contextmanager
    def _as_data_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _not_written(self._path, error) from error


def _not_written(path: str, error: OSError) -> DataError:
    return DataError(f"{path}: cannot be written; check the space that is left there. {error}")
