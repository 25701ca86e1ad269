"""`mpidp data inspect`: the contents of an HDF5 file, what the loader would make of it, and advice."""

import math
import shlex
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mpidp.errors import DataError
from mpidp.hdf5.dataset import DataSet
from mpidp.hdf5.files.contents import DatasetInfo, FileInfo, list_datasets
from mpidp.hdf5.files.describe import absolute_paths, describe
from mpidp.hdf5.memory_budget import choose_mixing, choose_shuffle, default_node_bytes, first_batch_bytes
from mpidp.hdf5.order import Order
from mpidp.hdf5.read import decoding, slow_paths
from mpidp.printable import listed
from mpidp.tools.data.convert import default_chunk_rows
from mpidp.tools.data.options import InspectOptions
from mpidp.tools.table import size_text, table
from mpidp.world.system import memory_limit

ReadOrder = Literal["streams", "full", "none"]


@dataclass(frozen=True)
class StoredField:
    """A dataset whose first axis counts the samples: shape, chunk shape (None without chunks), bytes of a value."""

    shape: tuple[int, ...]
    chunks: tuple[int, ...] | None
    itemsize: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape[1:]) * self.itemsize

    @property
    def decoded_row_bytes(self) -> int:
        """Bytes that a row takes in its chunks, what pads them at the edges included."""
        if self.chunks is None:
            return self.row_bytes
        padded = (-(-n // c) * c for n, c in zip(self.shape[1:], self.chunks[1:], strict=True))
        return math.prod(padded) * self.itemsize


def amplification(fields: Sequence[StoredField], range_rows: int, order: ReadOrder) -> float:
    """Return the bytes decoded for each byte used in an epoch, where nothing decoded is kept for later.

    Args:
        fields: the fields of a run, with equal numbers of rows, at least one.
        range_rows: how many rows the loader reads together.
        order: "streams" reads such ranges once each, in any order; "full" reads single rows; "none" goes through the
            file once.
    """
    num_rows = fields[0].shape[0]
    decoded = sum(_decoded_rows(field, num_rows, range_rows, order) * field.decoded_row_bytes for field in fields)
    return decoded / (num_rows * sum(field.row_bytes for field in fields))


def _decoded_rows(field: StoredField, num_rows: int, range_rows: int, order: ReadOrder) -> int:
    """Return how many rows of a field are decoded, counting each as often as it is."""
    if field.chunks is None:
        return num_rows
    height = field.chunks[0]
    if order == "full":
        return num_rows * height
    if order == "none":
        return -(-num_rows // height) * height
    starts = np.arange(0, num_rows, range_rows, dtype=np.int64)
    lasts = np.minimum(starts + range_rows, num_rows) - 1
    return int((lasts // height - starts // height + 1).sum()) * height


_GLOBAL_BATCH = 64


def loader_facts(found: DataSet) -> list[str]:
    """Return how one file with these fields is read by default on this machine."""
    (file,) = found.files
    streams, mixing_chunks = choose_mixing(found, default_node_bytes(memory_limit()), None, None, _GLOBAL_BATCH)
    order = Order(found.chunk_rows, 0, streams, mixing_chunks, _GLOBAL_BATCH, choose_shuffle(found))
    unit = "chunks" if file.chunked else "ranges (not chunked)"
    height = min(file.range_rows, found.num_rows)
    chunk_bytes = found.mean_chunk_bytes
    lines = [
        f"  samples   {found.num_rows} of {size_text(found.row_bytes)} in memory",
        f"  reading   {len(found.chunk_rows)} {unit} of {height} rows, {size_text(chunk_bytes)} in memory",
        f"  decoding  {decoding(found)}",
        *(f"  slow      {line}" for line in slow_paths(found)),
    ]
    if order.shuffle == "streams":
        lines.append(f"  streams   {streams} by default, with {mixing_chunks} chunks of a stream mixed")
        lines.append(f"  memory    {size_text(mixing_chunks * chunk_bytes)} for those chunks of one stream")
    else:
        lines.append(f"  order     {order.shuffle} by default: samples are read one by one")
    first = size_text(first_batch_bytes(order, found))
    lines.append(f"  first     {first} are read, by all ranks together, before the first batch of {_GLOBAL_BATCH}")
    widened = [field for field in found.fields if field.dtype != field.stored]
    return lines + [f"  dtype     {field.name} is stored as {field.stored}, read as {field.dtype}" for field in widened]


# Below, a chunk costs more to find than to read; above, few of them fill the memory of a rank.
SMALL_CHUNK_BYTES, LARGE_CHUNK_BYTES = 16 << 10, 16 << 20
# Compression that saves less than this is not worth the time of decoding.
LEAST_RATIO = 1.1
_CONVERT = "mpidp data convert"


def advice(path: str, datasets: Sequence[DatasetInfo]) -> list[str]:
    """Return what could be better about the datasets that hold rows of numbers; [] if nothing."""
    usable = [d for d in datasets if d.facts.shape and math.prod(d.facts.shape) and d.facts.dtype is not None]
    # The largest of the datasets that are read together sets the height of chunks for all of them.
    largest: dict[int, DatasetInfo] = {}
    for dataset in sorted(usable, key=lambda dataset: dataset.raw_bytes):
        largest[(dataset.facts.shape or (0,))[0]] = dataset
    lines: list[str] = []
    for dataset in usable:
        lines += [f"{dataset.name}: {text}" for text in _of_dataset(path, dataset, dataset in largest.values())]
    return [*lines, *_of_heights(path, usable)]


def stack_advice(path: str, stacks: Mapping[str, Sequence[str]]) -> list[str]:
    """Return what to do about groups that hold a group for each sample."""
    return [
        f'"{base or "/"}" holds {len(names):,} groups, {listed(names, most=3)}; the loader needs one dataset for each '
        f"field: {_command(path)} --stack-groups={shlex.quote(base or '/')}"
        for base, names in stacks.items()
    ]


def _of_dataset(path: str, dataset: DatasetInfo, is_largest: bool) -> Iterator[str]:
    facts = dataset.facts
    assert facts.shape is not None and facts.dtype is not None
    if facts.chunks is not None:
        if is_largest:
            yield from _of_shape(path, dataset, facts.shape, facts.chunks, facts.dtype)
        yield from _of_filters(path, dataset, facts.shape, facts.chunks, facts.dtype)
    if dataset.layout == "virtual":
        yield f"is virtual; every read goes through other files: {_command(path)}"
    if facts.dtype == np.float64 and dataset.raw_bytes > LARGE_CHUNK_BYTES:
        yield "is float64; float32 would halve what is read, and is what models compute with"
    if facts.matlab_class:
        yield "was written by MATLAB, whose axes are reversed; see that the first axis counts the samples"


def _of_shape(
    path: str, dataset: DatasetInfo, shape: tuple[int, ...], chunks: tuple[int, ...], dtype: np.dtype[np.generic]
) -> Iterator[str]:
    chunk_bytes = math.prod(chunks) * dtype.itemsize
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    rows = default_chunk_rows(shape[0], row_bytes)
    better = f"{_command(path)} --chunk-rows={rows}"
    splits = math.prod(-(-n // c) for n, c in zip(shape[1:], chunks[1:], strict=True))
    if splits > 1:
        yield f"chunks split each row into {splits} parts, all of which are decoded for one row: {better}"
    elif chunk_bytes > LARGE_CHUNK_BYTES and rows < chunks[0]:
        yield f"chunks are {size_text(chunk_bytes)}; a rank holds several of them at a time: {better}"
    elif chunk_bytes < SMALL_CHUNK_BYTES and rows > chunks[0] and dataset.num_chunks > 1:
        yield f"chunks are {size_text(chunk_bytes)} only, and each is found and read by itself: {better}"
    elif shape[0] < chunks[0]:
        yield f"has {shape[0]} rows and chunks of {chunks[0]}: the rest is stored and decoded for nothing: {better}"


def _of_filters(
    path: str, dataset: DatasetInfo, shape: tuple[int, ...], chunks: tuple[int, ...], dtype: np.dtype[np.generic]
) -> Iterator[str]:
    ratio = dataset.raw_bytes / dataset.stored_bytes if dataset.stored_bytes else 1.0
    compressors = [name for name in dataset.filters if name not in ("shuffle", "fletcher32")]
    if compressors and ratio < LEAST_RATIO and shape[0] >= chunks[0]:
        saved = f"{max(0.0, 1 - 1 / ratio):.0%}"
        yield f"compression saves {saved} and costs decoding each time: {_command(path)} --compression=none"
    elif compressors[:1] and compressors[0].startswith("deflate") and dtype.itemsize > 1:
        if "shuffle" not in dataset.filters:
            yield f"is compressed without the shuffle filter, which suits values of several bytes: {_command(path)}"
    elif not compressors and dataset.raw_bytes > LARGE_CHUNK_BYTES:
        yield f"is not compressed; where disks are slow, gzip or lz4 may be read faster: {_command(path)}"


def _of_heights(path: str, datasets: Sequence[DatasetInfo]) -> Iterator[str]:
    by_rows: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for dataset in datasets:
        if dataset.facts.shape and dataset.facts.chunks:
            by_rows[dataset.facts.shape[0]].append((dataset.name, dataset.facts.chunks[0]))
    for members in by_rows.values():
        if len({height for _, height in members}) > 1:
            found = listed([f"{name} {height}" for name, height in members])
            yield f"chunks differ in their rows ({found}), and are best equal where read together: {_command(path)}"


def _command(path: str) -> str:
    return f"{_CONVERT} {shlex.quote(path)} NEW.h5"


_ORDERS: tuple[ReadOrder, ...] = ("streams", "full", "none")
_MOST_NAMED = 10


def inspect_by(options: InspectOptions) -> tuple[str, bool]:
    """Describe the file that the command line names; as `inspect`."""
    return inspect(options.file)


def inspect(path: str) -> tuple[str, bool]:
    """Describe the file; return the text, and whether nothing in it is damaged.

    Raises `DataError` if it cannot be opened as HDF5.
    """
    info = list_datasets(path)
    parts = [path + _attributes_text(info.attributes)]
    if info.datasets:
        parts.append(_datasets_text(info))
    else:
        parts[0] += "\n  no datasets"
    for dataset in info.datasets:
        if dataset.attributes:
            parts.append(f"{dataset.name}{_attributes_text(dataset.attributes)}")
    damaged = [f'{path}: "{name}" {text}' for name, text in info.tree.damaged]
    loader = _loader_text(path, info, damaged)
    parts.append(_section("links", [f"{name} leads to {where}" for name, where in info.tree.links]))
    parts.append(loader)
    parts.append(_section("damaged", damaged))
    return "\n\n".join(part for part in parts if part), not damaged


def _section(title: str, lines: list[str]) -> str:
    """Return lines under a title, at most ten of them; "" for none."""
    more = [f"and {len(lines) - _MOST_NAMED:,} more"] if len(lines) > _MOST_NAMED else []
    return "\n".join([title, *(f"  {line}" for line in [*lines[:_MOST_NAMED], *more])]) if lines else ""


def _attributes_text(attributes: dict[str, str]) -> str:
    return "".join(f"\n  {name}: {text}" for name, text in attributes.items())


def _datasets_text(info: FileInfo) -> str:
    header = ("dataset", "shape", "dtype", "layout", "chunk", "chunks", "filters", "stored", "raw", "ratio")
    rows = [
        (
            dataset.name,
            "no dataspace" if dataset.facts.shape is None else _shape_text(dataset.facts.shape),
            dataset.facts.type_name,
            dataset.layout,
            _shape_text(dataset.facts.chunks) if dataset.facts.chunks else "-",
            dataset.num_chunks or "-",
            " ".join(dataset.filters) or "-",
            size_text(dataset.stored_bytes),
            size_text(dataset.raw_bytes),
            f"{dataset.raw_bytes / dataset.stored_bytes:.2f}" if dataset.stored_bytes else "-",
        )
        for dataset in info.datasets
    ]
    return table(header, rows) + (f"\n  and {info.num_more:,} more datasets" if info.num_more else "")


def _shape_text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) if shape else "scalar"


def _loader_text(path: str, info: FileInfo, damaged: list[str]) -> str:
    """Say which datasets can be fields of one run, and how the loader would read them; add to `damaged`."""
    (full,) = absolute_paths(path)
    by_rows: dict[int, list[str]] = defaultdict(list)
    remarks = _remarks(info)
    candidates = tuple(dataset for dataset in info.datasets if dataset not in info.samples)
    for dataset in candidates:
        try:
            found = _describe(full, [dataset.name], remarks)
            by_rows[found.num_rows].append(dataset.name)
        except DataError as error:
            if "file may be damaged" in str(error):
                damaged.append(str(error))
            else:
                remarks.append(str(error).removeprefix(f"{full}: "))
    texts = [_fields_text(_describe(full, names, []), candidates) for names in by_rows.values()]
    texts.append(_section("remarks", remarks))
    texts.append(_section("advice", [*stack_advice(path, info.tree.stacks), *advice(path, candidates)]))
    return "\n\n".join(text for text in texts if text)


def _remarks(info: FileInfo) -> list[str]:
    """Return what a user should know of datasets that are no fields."""
    remarks = [f"{name} {text}" for name, text in info.tree.dangling]
    for name, what in info.tree.sparse:
        remarks.append(f"{name} is {what}: no field; write it as one dataset of rows, dense, to train on it")
    kinds: dict[str, list[str]] = defaultdict(list)
    for name, what in info.tree.internal.items():
        if "sparse" not in what:
            kinds[what].append(name)
    remarks += [f"{listed(names)}: {what}, no field" for what, names in kinds.items()]
    return remarks


def _describe(path: str, names: list[str], remarks: list[str]) -> DataSet:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = describe(path, names)
    remarks += [str(warning.message).removeprefix(f"{path}: ") for warning in caught]
    return found


def _fields_text(found: DataSet, datasets: tuple[DatasetInfo, ...]) -> str:
    names = ", ".join(f'"{field.name}"' for field in found.fields)
    lines = [f"data.fields = [{names}] would give", *loader_facts(found)]
    by_name = {dataset.name: dataset.facts for dataset in datasets}
    stored = [
        StoredField(facts.shape, facts.chunks, facts.dtype.itemsize)
        for facts in (by_name[field.name] for field in found.fields)
        if facts.shape and facts.dtype is not None
    ]
    if stored:
        range_rows = found.files[0].range_rows
        ratios = ", ".join(f"{order} {amplification(stored, range_rows, order):.1f}" for order in _ORDERS)
        lines.append(f"  decoded   bytes for each byte used, if nothing is kept: {ratios}")
    return "\n".join(lines)
