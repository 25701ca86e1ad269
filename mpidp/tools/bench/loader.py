"""`mpidp bench loader`: how fast mpidp's loader reads a file, beside other loaders and what the machine allows.

Every side reads the same number of rows, checks what it read once, and takes turns with the others. Times are
of one process; what workers burn counts in the processor time.
"""

import gc
import json
import os
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, cast

import numpy as np
import torch

from mpidp.errors import MpidpError
from mpidp.hdf5.dataset import DataSet, Storage
from mpidp.hdf5.decode import RawFiles
from mpidp.hdf5.files.describe import absolute_paths, describe
from mpidp.hdf5.filters import Bytes, Scratch, inflater, undo
from mpidp.hdf5.loader import HDF5Loader
from mpidp.hdf5.memory_budget import chunks_in_a_batch
from mpidp.hdf5.order.order import Shuffle
from mpidp.hdf5.read import decoding
from mpidp.tools.bench.loader_baselines import data_loader, one_row, whole_chunks
from mpidp.tools.bench.options import LoaderOptions
from mpidp.tools.table import table

_CHECKED_ROWS = 16


@dataclass(frozen=True)
class Side:
    """One way to read `rows` rows: `run` does it once; `rest` ends what goes on in the background, untimed."""

    name: str
    rows: int
    row_bytes: int
    run: Callable[[], None]
    chunks_per_batch: float | None = None
    rest: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Row:
    """What was measured of a side: medians over the repeats, and the spread of the rate.

    samples_per_s: with the slowest and the fastest repeat. decoded_mb_per_s: 10^6 bytes of rows in memory.
    of_ceiling: its rate as a share of decoding alone on as many threads, of the same repeat. of_raw_read: likewise
    of reading the stored bytes. cpu_s_per_gb: processor seconds, those of workers too, for 10^9 bytes in memory.
    """

    name: str
    samples_per_s: float
    min_samples_per_s: float
    max_samples_per_s: float
    decoded_mb_per_s: float
    of_ceiling: float | None
    of_raw_read: float | None
    cpu_s_per_gb: float
    chunks_per_batch: float | None


def bench_loader(options: LoaderOptions) -> str:
    """Measure and return the report: JSON in one line, or a table.

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
        sides = _sides(options, dataset, path, rows, threads, stack)
        times = _measure(sides, options.repeats, path if options.cold else None)
    limits = {side.name: side for side in sides if side.name in ("ceiling", "raw read")}
    measured = [_row(side, times, limits) for side in sides]
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
    if options.json:
        return json.dumps({**facts, "rows": [asdict(row) for row in measured]})
    return _text(facts, measured)


def _sides(
    options: LoaderOptions, dataset: DataSet, path: str, rows: int, threads: int, stack: ExitStack
) -> list[Side]:
    ceiling = Ceiling(dataset, rows)
    stack.callback(ceiling.close)
    sides = []
    if ceiling.storage is not None:
        row_bytes = ceiling.storage.chunk_bytes // ceiling.storage.block_rows
        sides = [
            Side(name, ceiling.num_rows, row_bytes, partial(run, threads))
            for name, run in (("raw read", ceiling.read), ("ceiling", ceiling.decode))
        ]
    for shuffle in options.shuffles:
        order = cast(Shuffle, shuffle)  # the loader says which there are
        loader = HDF5Loader(path, options.fields, options.global_batch, world=None, shuffle=order, threads=threads)
        stack.callback(loader.close)
        run = _passes(partial(_endless, loader), options.samples, dataset, path)
        mixed = chunks_in_a_batch(loader.order) if shuffle == "lanes" else None
        sides.append(Side(f"mpidp {shuffle}", options.samples, dataset.row_bytes, run, mixed, loader.stop))
    if options.against == "dataloader":
        sides += _baselines(options, dataset, path, rows, stack)
    return sides


def _baselines(options: LoaderOptions, dataset: DataSet, path: str, rows: int, stack: ExitStack) -> list[Side]:
    names = [field.dataset for field in dataset.fields]
    chunk_rows = dataset.files[0].range_rows
    sides = []
    for whole_batches in (False, True):
        for workers in (0, 2):
            # The slow ones read fewer rows, or they alone would take the time.
            few = rows if whole_batches else max(options.global_batch, rows // 4)
            loader = data_loader(path, names, dataset.num_rows, options.global_batch, few, workers, whole_batches)
            name = f"DataLoader, {'batches' if whole_batches else 'rows'}, {workers} workers"
            sides.append(Side(name, few, dataset.row_bytes, partial(_drain, loader)))
    # HDF5 shares its chunk cache between all openings of a file in a process, so this side gets a file of its own.
    copy = os.path.join(stack.enter_context(tempfile.TemporaryDirectory()), os.path.basename(path))
    shutil.copyfile(path, copy)
    run = partial(_run_whole_chunks, copy, names, chunk_rows, rows)
    return [*sides, Side("h5py, whole chunks in file order", rows, dataset.row_bytes, run)]


def _drain(loader: Any) -> None:
    for _ in loader:
        pass


def _run_whole_chunks(path: str, names: Sequence[str], chunk_rows: int, rows: int) -> None:
    for _ in whole_chunks(path, names, chunk_rows, rows):
        pass


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
    for place, row in enumerate(batch.indices[:_CHECKED_ROWS].tolist()):
        plain = one_row(path, [field.dataset for field in dataset.fields], row)
        for field in dataset.fields:
            if not np.array_equal(batch[field.name][place].numpy(), plain[field.dataset]):
                raise MpidpError(f'row {row} of "{field.name}" differs from what h5py reads')


@dataclass(frozen=True)
class _Time:
    wall_s: float
    cpu_s: float


def _measure(sides: Sequence[Side], repeats: int, drop: str | None) -> dict[str, list[_Time]]:
    """Return the times of each side's repeats; all sides take turns, after one untimed turn."""
    times: dict[str, list[_Time]] = {side.name: [] for side in sides}
    for repeat in range(-1, repeats):
        for side in sides:
            if drop is not None:
                _drop_from_page_cache(drop)
            gc.collect()
            start_s, start_cpu_s = time.perf_counter(), _cpu_s()
            side.run()
            if repeat >= 0:
                times[side.name].append(_Time(time.perf_counter() - start_s, _cpu_s() - start_cpu_s))
            side.rest()
    return times


def _drop_from_page_cache(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _cpu_s() -> float:
    """Return processor seconds of this process and of the live and ended children whose times it can see."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
    ticks = os.sysconf("SC_CLK_TCK")
    for child in _children():
        fields = child.rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / ticks
    return total


def _children() -> Iterator[str]:
    import multiprocessing

    for process in multiprocessing.active_children():
        try:
            with open(f"/proc/{process.pid}/stat", encoding="ascii", errors="replace") as stat:
                yield stat.read()
        except FileNotFoundError:  # it has just ended, and counts among the ended
            continue


def _row(side: Side, times: dict[str, list[_Time]], limits: dict[str, Side]) -> Row:
    own = times[side.name]
    rates = [side.rows / each.wall_s for each in own]
    gigabytes = side.rows * side.row_bytes / 1e9
    return Row(
        name=side.name,
        samples_per_s=median(rates),
        min_samples_per_s=min(rates),
        max_samples_per_s=max(rates),
        decoded_mb_per_s=median(rates) * side.row_bytes / 1e6,
        of_ceiling=_share(own, times.get("ceiling"), side, limits.get("ceiling")),
        of_raw_read=_share(own, times.get("raw read"), side, limits.get("raw read")),
        cpu_s_per_gb=median(each.cpu_s for each in own) / gigabytes,
        chunks_per_batch=side.chunks_per_batch,
    )


def _share(own: Sequence[_Time], limit: Sequence[_Time] | None, side: Side, ceiling: Side | None) -> float | None:
    """Return the median over repeats of the side's rate as a share of the limit's in the same repeat."""
    if limit is None or ceiling is None:
        return None
    rates = [(side.rows / each.wall_s, ceiling.rows / most.wall_s) for each, most in zip(own, limit, strict=True)]
    return median(rate / most for rate, most in rates)


def _text(facts: dict[str, Any], rows: Sequence[Row]) -> str:
    header = ("reader", "samples/s", "from", "to", "MB/s", "of ceiling", "of raw read", "CPU s/GB", "chunks a batch")
    cells = [
        (
            row.name,
            *(f"{rate:,.0f}" for rate in (row.samples_per_s, row.min_samples_per_s, row.max_samples_per_s)),
            f"{row.decoded_mb_per_s:,.0f}",
            *("-" if share is None else f"{share:.2f}" for share in (row.of_ceiling, row.of_raw_read)),
            f"{row.cpu_s_per_gb:.2f}",
            "-" if row.chunks_per_batch is None else f"{row.chunks_per_batch:.0f}",
        )
        for row in rows
    ]
    heading = (
        f"loader: {facts['file']}, {facts['samples']:,} samples of {facts['row_bytes']:,} bytes, "
        f"{facts['threads']} threads, page cache {facts['page_cache']}, {facts['repeats']} repeats\n"
        f"{facts['decoding']}"
    )
    return f"{heading}\n{table(header, cells)}"


class Ceiling:
    """The chunks of the field with most bytes a row, of the first file, up to about `most_rows` rows."""

    def __init__(self, dataset: DataSet, most_rows: int) -> None:
        number = int(np.argmax([field.row_bytes for field in dataset.fields]))
        storage = dataset.files[0].storages[number]
        self.storage: Storage | None = storage if storage is not None and storage.chunked else None
        self.num_rows = 0
        if self.storage is None:
            return
        blocks = min(len(self.storage.offsets), -(-most_rows // self.storage.block_rows))
        self._offsets = self.storage.offsets[:blocks].ravel()
        self._sizes = self.storage.sizes[:blocks].ravel()
        self.num_rows = min(blocks * self.storage.block_rows, self.storage.num_rows)
        self._files = RawFiles()
        self._raw = [self._read(*place) for place in zip(self._offsets.tolist(), self._sizes.tolist(), strict=True)]

    def read(self, threads: int) -> None:
        """Read all chunks from the file."""
        room = [np.empty(int(self._sizes.max()), np.uint8) for _ in range(threads)]
        places = list(zip(self._offsets.tolist(), self._sizes.tolist(), strict=True))
        assert self.storage is not None
        path = self.storage.path

        def work(thread: int) -> None:
            for offset, size in places[thread::threads]:
                self._files.read(path, offset, room[thread][:size])

        _in_threads(work, threads)

    def decode(self, threads: int) -> None:
        """Undo the filters of all chunks, which are in memory, each thread into one buffer."""
        storage = self.storage
        assert storage is not None
        room = [np.empty(storage.chunk_bytes, np.uint8) for _ in range(threads)]
        scratch = [Scratch() for _ in range(threads)]

        def work(thread: int) -> None:
            for raw in self._raw[thread::threads]:
                undo(raw, storage.filters, 0, storage.chunk_bytes, scratch[thread], room[thread])

        _in_threads(work, threads)

    def close(self) -> None:
        """Close the file."""
        if self.storage is not None:
            self._files.close()

    def _read(self, offset: int, size: int) -> Bytes:
        assert self.storage is not None
        raw = np.empty(size, np.uint8)
        self._files.read(self.storage.path, offset, raw)
        return raw


def _in_threads(work: Callable[[int], None], threads: int) -> None:
    running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
