"""`mpidp bench loader`: the speed of the loader on a file, compared with the machine's limits.

Every side reads the same number of rows and takes turns with the others. Times are of one process.
"""

import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, cast

import numpy as np
import torch

from mpidp.errors import MpidpError
from mpidp.hdf5.dataset import DataSet
from mpidp.hdf5.decode import RawFiles
from mpidp.hdf5.files.describe import absolute_paths, describe
from mpidp.hdf5.files.file import open_file
from mpidp.hdf5.filters import Scratch, inflater, undo
from mpidp.hdf5.loader import HDF5Loader
from mpidp.hdf5.memory_budget import chunks_in_a_batch
from mpidp.hdf5.order import Shuffle
from mpidp.hdf5.read import decoding
from mpidp.tools.bench.options import LoaderOptions
from mpidp.tools.table import table
from mpidp.world.world import World

_CHECKED_ROWS = 16
_LIMITS = {"of_ceiling": "ceiling", "of_raw_read": "raw read"}


@dataclass(frozen=True)
class Side:
    """One way to read `rows` rows: `run` does it once; `rest` ends what goes on in the background, untimed.

    `cpu_s` is a count of the processor seconds that it uses.
    """

    name: str
    rows: int
    row_bytes: int
    run: Callable[[], None]
    chunks_per_batch: float | None = None
    rest: Callable[[], None] = lambda: None
    cpu_s: Callable[[], float] = time.process_time


MakeSides = Callable[[DataSet, int, ExitStack], list[Side]]


def bench_loader(options: LoaderOptions, more: MakeSides = lambda dataset, rows, stack: []) -> str:
    """Measure and return the report: JSON in one line, or a table.

    `more` returns further sides, as `benchmarks/loader.py` has them, for so many rows of the data.

    In JSON each row has medians over the repeats: `samples_per_s`, with its least and greatest; `decoded_mb_per_s`,
    10^6 bytes of rows in memory; `of_ceiling`, the rate as a share of decoding alone on as many threads, of the same
    repeat; `of_raw_read`, likewise of reading the stored bytes; `cpu_s_per_gb`, processor seconds for 10^9 bytes in
    memory.

    Raises:
        DataError: a file that cannot be used.
        MpidpError: a side that read something else than the file holds.
    """
    path = absolute_paths(options.file)[0]
    dataset = describe(path, options.fields)
    rows = min(options.samples, dataset.num_rows)
    threads = options.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(1)
    with ExitStack() as stack:
        sides = _limits(dataset, rows, threads, stack)
        sides += _loaders(options, dataset, path, threads, stack)
        sides += more(dataset, rows, stack)
        rates, cpu_s = _measure(sides, options.repeats, path if options.cold else None)
    measured = [_row(side, rates, cpu_s) for side in sides]
    facts = {
        "file": path,
        "samples": rows,
        "row_bytes": dataset.row_bytes,
        "threads": threads,
        "page_cache": "dropped before each repeat" if options.cold else "warm",
        "decoding": decoding(dataset),
        "inflater": inflater(),
        "repeats": options.repeats,
    }
    return json.dumps({**facts, "rows": measured}) if options.json else _text(facts, measured)


def _limits(dataset: DataSet, most_rows: int, threads: int, stack: ExitStack) -> list[Side]:
    """What no loader can pass: reading the stored bytes, and undoing their filters from memory.

    Both take the chunks of the field with most bytes a row, of the first file, up to about `most_rows` rows.
    """
    number = int(np.argmax([field.row_bytes for field in dataset.fields]))
    storage = dataset.files[0].storages[number]
    if storage is None or not storage.chunked:
        return []
    blocks = min(len(storage.offsets), -(-most_rows // storage.block_rows))
    offsets, sizes = (numbers[:blocks].ravel().tolist() for numbers in (storage.offsets, storage.sizes))
    files = RawFiles()
    stack.callback(files.close)
    chunks = [np.empty(size, np.uint8) for size in sizes]
    for offset, chunk in zip(offsets, chunks, strict=True):
        files.read(storage.path, offset, chunk)
    stored = [np.empty(max(sizes), np.uint8) for _ in range(threads)]
    decoded = [np.empty(storage.chunk_bytes, np.uint8) for _ in range(threads)]
    scratch = [Scratch() for _ in range(threads)]
    pool = stack.enter_context(ThreadPoolExecutor(threads))

    def read(thread: int) -> None:
        for index in range(thread, len(chunks), threads):
            files.read(storage.path, offsets[index], stored[thread][: sizes[index]])

    def decode(thread: int) -> None:
        for chunk in chunks[thread::threads]:
            undo(chunk, storage.filters, 0, storage.chunk_bytes, scratch[thread], decoded[thread])

    def in_threads(work: Callable[[int], None]) -> None:
        for _ in pool.map(work, range(threads)):
            pass

    rows, row_bytes = min(blocks * storage.block_rows, storage.num_rows), storage.chunk_bytes // storage.block_rows
    works = {"raw read": read, "ceiling": decode}
    return [Side(name, rows, row_bytes, partial(in_threads, work)) for name, work in works.items()]


def _loaders(options: LoaderOptions, dataset: DataSet, path: str, threads: int, stack: ExitStack) -> list[Side]:
    sides = []
    for shuffle in options.shuffles:
        order = cast(Shuffle, shuffle)  # the loader says which there are
        loader = HDF5Loader(
            path, options.fields, options.global_batch, world=World.alone(), shuffle=order, threads=threads
        )
        stack.callback(loader.close)
        run = _passes(partial(_endless, loader), options.samples, dataset, path)
        mixed = chunks_in_a_batch(loader.order) if shuffle == "streams" else None
        sides.append(Side(f"mpidp {shuffle}", options.samples, dataset.row_bytes, run, mixed, loader.stop))
    return sides


def _endless(loader: HDF5Loader) -> Iterator[Any]:
    while True:
        yield from loader


def _passes(make: Callable[[], Iterator[Any]], rows: int, dataset: DataSet, path: str) -> Callable[[], None]:
    """Return what reads about `rows` rows, the next after those of the last call; the very first batch is checked."""
    checked = False

    def run() -> None:
        nonlocal checked
        batches, done = make(), 0
        while done < rows:
            batch = next(batches)
            if not checked:
                _check(batch, dataset, path)
                checked = True
            done += batch.size

    return run


def _check(batch: Any, dataset: DataSet, path: str) -> None:
    """Raise `MpidpError` unless rows of the batch are what the plainest reading of the file gives."""
    with open_file(path, 0) as file:
        for place, row in enumerate(batch.indices[:_CHECKED_ROWS].tolist()):
            for field in dataset.fields:
                if not np.array_equal(batch[field.name][place].numpy(), file[field.dataset][row]):
                    raise MpidpError(f'row {row} of "{field.name}" differs from what h5py reads')


def _measure(
    sides: Sequence[Side], repeats: int, drop: str | None
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Samples a second, and processor seconds, of each side's repeats; all take turns, after one untimed turn."""
    rates: dict[str, list[float]] = {side.name: [] for side in sides}
    cpu_s: dict[str, list[float]] = {side.name: [] for side in sides}
    for repeat in range(-1, repeats):
        for side in sides:
            if drop is not None:
                _drop_from_page_cache(drop)
            gc.collect()
            start_s, start_cpu_s = time.perf_counter(), side.cpu_s()
            side.run()
            if repeat >= 0:
                rates[side.name].append(side.rows / (time.perf_counter() - start_s))
                cpu_s[side.name].append(side.cpu_s() - start_cpu_s)
            side.rest()
    return rates, cpu_s


def _drop_from_page_cache(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _row(side: Side, rates: dict[str, list[float]], cpu_s: dict[str, list[float]]) -> dict[str, Any]:
    own = rates[side.name]
    shares: dict[str, float | None] = {}
    for key, limit in _LIMITS.items():
        most = rates.get(limit)
        shares[key] = median(rate / top for rate, top in zip(own, most, strict=True)) if most else None
    return {
        "name": side.name,
        "samples_per_s": median(own),
        "min_samples_per_s": min(own),
        "max_samples_per_s": max(own),
        "decoded_mb_per_s": median(own) * side.row_bytes / 1e6,
        **shares,
        "cpu_s_per_gb": median(cpu_s[side.name]) / (side.rows * side.row_bytes / 1e9),
        "chunks_per_batch": side.chunks_per_batch,
    }


def _text(facts: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    columns = {
        "reader": ("name", ""),
        "samples/s": ("samples_per_s", ",.0f"),
        "from": ("min_samples_per_s", ",.0f"),
        "to": ("max_samples_per_s", ",.0f"),
        "MB/s": ("decoded_mb_per_s", ",.0f"),
        "of ceiling": ("of_ceiling", ".2f"),
        "of raw read": ("of_raw_read", ".2f"),
        "CPU s/GB": ("cpu_s_per_gb", ".2f"),
        "chunks a batch": ("chunks_per_batch", ".0f"),
    }
    cells = [["-" if row[key] is None else f"{row[key]:{style}}" for key, style in columns.values()] for row in rows]
    heading = (
        f"loader: {facts['file']}, {facts['samples']:,} samples of {facts['row_bytes']:,} bytes, "
        f"{facts['threads']} threads, page cache {facts['page_cache']}, {facts['repeats']} repeats\n"
        f"{facts['decoding']}"
    )
    return f"{heading}\n{table(list(columns), cells)}"
