"""Samples of 64 KiB to 64 MiB: the order chosen by default against a full shuffle, first epoch and later ones.

    python benchmarks/large_samples.py [--samples 64KiB,1MiB] [--filters raw,lz4] [--chunks 1,2,4] [--repeats 5]

Writes a file at a time, of about 512 MiB, to the temporary folder. Loaders of both orders take turns, in one process
with two threads each, the file in the page cache. Prints a line a file: medians, with the least and the most.
"""

import argparse
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import h5py
import hdf5plugin
import numpy as np

import mpidp

FILE_BYTES = 2**29
FILTERS: dict[str, dict[str, Any]] = {"raw": {}, "lz4": dict(hdf5plugin.LZ4())}
ORDERS = ("auto", "full")
UNITS = {"KiB": 2**10, "MiB": 2**20}


def write(path: Path, sample_bytes: int, chunk_rows: int, options: dict[str, Any]) -> int:
    """Write float32 samples of which LZ4 makes 0.41, and return how many."""
    num_samples = max(24, FILE_BYTES // sample_bytes)
    num_values = sample_bytes // 4
    random = np.random.default_rng(0)
    sample = np.repeat(random.random(num_values // 4, dtype="f4"), 4)
    with h5py.File(path, "w") as file:
        data = file.create_dataset("x", (num_samples, num_values), "f4", chunks=(chunk_rows, num_values), **options)
        for row in range(0, num_samples, chunk_rows):
            stop = min(row + chunk_rows, num_samples)
            data[row:stop] = np.stack([np.roll(sample, 4 * number) for number in range(row, stop)])
    return num_samples


def epochs(path: Path, shuffle: Any, batch: int, seed: int) -> tuple[float, float, float, mpidp.HDF5Loader]:
    """Return seconds to the first batch, of the first epoch, and of the second; and the loader, closed."""
    loader = mpidp.HDF5Loader(path, ("x",), batch, seed=seed, shuffle=shuffle, threads=2)
    times = []
    for _ in range(2):
        start_s, first_s = time.perf_counter(), 0.0
        for _ in loader:
            first_s = first_s or time.perf_counter() - start_s
        times += [first_s, time.perf_counter() - start_s]
    loader.close()
    return times[0], times[1], times[3], loader


def text(values: list[float]) -> str:
    """Return median (least-most)."""
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def measure(path: Path, name: str, num_bytes: int, batch: int, repeats: int) -> str:
    """Return a line of the table."""
    found: dict[str, list[list[float]]] = {order: [[], [], []] for order in ORDERS}
    lines = {}
    for repeat in range(-1, repeats):  # one untimed: the process touches memory that it is given again later
        for order in ORDERS[:: 1 if repeat % 2 else -1]:
            first_s, *epoch_s, loader = epochs(path, order, batch, repeat + 1)
            lines[order] = loader.line.split(",")[0].removeprefix("shuffle ")
            if repeat >= 0:
                for column, value in zip(
                    found[order], [first_s * 1e3, *(num_bytes / 2**30 / s for s in epoch_s)], strict=True
                ):
                    column.append(value)
    default, full = found["auto"], found["full"]
    ratios = [[a / b for a, b in zip(default[place], full[place], strict=True)] for place in (1, 2)]
    columns = (*ratios, default[1], full[1], default[2], full[2], default[0], full[0])
    return "| " + " | ".join([name, lines["auto"], *map(text, columns)]) + " |"


def main() -> None:
    """Measure every combination that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", default="64KiB,1MiB,4MiB,64MiB")
    parser.add_argument("--filters", default="raw,lz4")
    parser.add_argument("--chunks", default="1,2,4")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # that a full shuffle decodes chunks again and again is what is measured
    header = "sample, filter, rows of a chunk|order chosen|ratio, first epoch|second|default GiB/s, first|full, first|"
    header += "default, second|full, second|default ms to first batch|full"
    print(f"|{header}|\n|{'---|' * header.count('|')}---|")
    for size in options.samples.split(","):
        sample_bytes = int(size[:-3]) * UNITS[size[-3:]]
        batch = 4 if sample_bytes > 2**24 else 8
        for name in options.filters.split(","):
            for chunk_rows in map(int, options.chunks.split(",")):
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder) / "large.h5"
                    num_samples = write(path, sample_bytes, chunk_rows, FILTERS[name])
                    label = f"{size}, {name}, {chunk_rows}"
                    print(measure(path, label, num_samples * sample_bytes, batch, options.repeats), flush=True)


if __name__ == "__main__":
    main()
