"""mpidp's loader on a file, against torch's DataLoader over h5py in its usual forms, and against h5py alone.

    python benchmarks/loader.py FILE [OPTIONS of mpidp bench loader]

The other readers are written as well as their kind allows: the file is opened lazily, once in each process, with a
chunk cache of a sensible size. All take turns in one run; each is checked to give every row once before it is timed.
Nothing here may start MPI when it is imported: worker processes import this module.
"""

import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from mpidp.hdf5.dataset import DataSet
from mpidp.hdf5.files.file import open_file
from mpidp.options import parse
from mpidp.tools.bench.loader import Side, bench_loader
from mpidp.tools.bench.options import LoaderOptions

_CACHE_BYTES = 64 * 2**20


class LazyDataset(Dataset[dict[str, Tensor]]):
    """Rows of an HDF5 file; opened at the first access in each process, never handed on to another."""

    def __init__(self, path: str, names: Sequence[str], num_rows: int) -> None:
        self._path = path
        self._names = tuple(names)
        self._num_rows = num_rows
        self._datasets: dict[str, Any] | None = None

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {name: torch.as_tensor(dataset[row]) for name, dataset in self._opened().items()}

    def _opened(self) -> dict[str, Any]:
        if self._datasets is None:
            file = open_file(self._path, _CACHE_BYTES)
            self._datasets = {name: file[name] for name in self._names}
        return self._datasets


class BatchDataset(LazyDataset):
    """The same, fetching the rows of a batch by one call of h5py for each dataset."""

    def __getitems__(self, rows: list[int]) -> list[dict[str, Tensor]]:
        """Return the rows as a list of one item, the batch, which `first_item` takes out of it."""
        order = np.argsort(rows, kind="stable")
        ascending = np.asarray(rows)[order]  # h5py takes indices in no other order
        batch = {}
        for name, dataset in self._opened().items():
            values = np.empty((len(rows), *dataset.shape[1:]), dataset.dtype)
            values[order] = dataset[ascending]
            batch[name] = torch.from_numpy(values)
        return [batch]


def first_item(batch: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the batch that `BatchDataset` made."""
    return batch[0]


class _Shuffled(Sampler[int]):
    """A new permutation of the rows at every pass."""

    def __init__(self, num_rows: int, most: int) -> None:
        self._num_rows, self._most, self._epoch = num_rows, most, 0

    def __len__(self) -> int:
        return self._most

    def __iter__(self) -> Iterator[int]:
        self._epoch += 1
        order = np.random.default_rng(self._epoch).permutation(self._num_rows)
        return iter(order[: self._most].tolist())


def data_loader(
    path: str, names: Sequence[str], num_rows: int, batch_size: int, most: int, workers: int, whole_batches: bool
) -> "DataLoader[dict[str, Tensor]]":
    """Return a DataLoader over `most` shuffled rows of a file.

    Workers are started afresh and not forked: a fork after MPI or threads have started is not safe.
    """
    dataset = (BatchDataset if whole_batches else LazyDataset)(path, names, num_rows)
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=_Shuffled(num_rows, most),
        num_workers=workers,
        collate_fn=first_item if whole_batches else None,
        multiprocessing_context="spawn" if workers else None,
        persistent_workers=workers > 0,
    )


def whole_chunks(path: str, names: Sequence[str], chunk_rows: int, most: int) -> Iterator[dict[str, Tensor]]:
    """Yield rows chunk by chunk in file order, by h5py in one thread: no shuffling at all."""
    file = open_file(path, _CACHE_BYTES)
    try:
        datasets = {name: file[name] for name in names}
        for start in range(0, most, chunk_rows):
            yield {name: torch.from_numpy(data[start : start + chunk_rows]) for name, data in datasets.items()}
    finally:
        file.close()


def other_readers(options: LoaderOptions, dataset: DataSet, rows: int, stack: ExitStack) -> list[Side]:
    """Return what is compared with mpidp's loader, for `rows` rows of a file."""
    names = [field.dataset for field in dataset.fields]
    sides = []
    for whole_batches in (False, True):
        for workers in (0, 2):
            # The slow ones read fewer rows, or they alone would take the time.
            few = rows if whole_batches else max(options.global_batch, rows // 4)
            loader = data_loader(
                options.file, names, dataset.num_rows, options.global_batch, few, workers, whole_batches
            )
            check(loader, few)
            name = f"DataLoader, {'batches' if whole_batches else 'rows'}, {workers} workers"
            sides.append(Side(name, few, dataset.row_bytes, partial(drain, loader.__iter__), cpu_s=cpu_s))
    # HDF5 shares its chunk cache between all openings of a file in a process, so this side gets a file of its own.
    copy = Path(stack.enter_context(tempfile.TemporaryDirectory()), Path(options.file).name)
    shutil.copyfile(options.file, copy)
    run = partial(drain, partial(whole_chunks, str(copy), names, dataset.files[0].range_rows, rows))
    return [*sides, Side("h5py, whole chunks in file order", rows, dataset.row_bytes, run)]


def check(loader: "DataLoader[dict[str, Tensor]]", rows: int) -> None:
    """A comparison with something that reads less would be worth nothing."""
    found = sum(len(next(iter(batch.values()))) for batch in loader)
    if found != rows:
        raise SystemExit(f"a DataLoader read {found} rows instead of {rows}")


def drain(make: Callable[[], Iterator[Any]]) -> None:
    """Read everything."""
    for _ in make():
        pass


def cpu_s() -> float:
    """Return processor seconds of this process and of its living workers."""
    total = time.process_time()
    for process in multiprocessing.active_children():
        fields = Path(f"/proc/{process.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def main() -> None:
    """Measure and print the table."""
    options = parse(LoaderOptions, "python benchmarks/loader.py", sys.argv[1:])
    print(bench_loader(options, partial(other_readers, options)))


if __name__ == "__main__":
    main()
