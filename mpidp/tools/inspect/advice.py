"""What a file holds enters; what its owner could do for faster reading leaves, one line each."""

import math
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from mpidp.hdf5.files.contents import DatasetInfo
from mpidp.printable import listed
from mpidp.tools.convert.plan import default_chunk_rows
from mpidp.tools.table import size_text

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
