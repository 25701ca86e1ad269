"""A loader's files, and ranks that are only pretended."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from mpidp.hdf5.loader import HDF5Loader
from mpidp.hdf5.order import Shuffle

SHUFFLES: tuple[Shuffle, ...] = ("streams", "full", "none")
ROWS = 150
CPU = torch.device("cpu")


@dataclass(frozen=True)
class OneOf:
    """A rank of a world whose other ranks are not there: collectives give what this rank alone would."""

    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    cores: int = 1
    device: torch.device = CPU
    roots: Any = None

    def broadcast(self, obj: Any) -> Any:
        return self.roots or obj

    def call_on_root(self, function: Callable[[], Any]) -> Any:
        return function()

    def sum(self, values: list[float]) -> list[float]:
        return [value * self.size for value in values]

    @contextmanager
    def raise_on_all_ranks(self, what: str) -> Iterator[None]:
        yield


def write(folder: Path) -> list[Path]:
    """Two files, differently stored; row i holds x = [i, i + 0.5, ...] and y = i."""
    x = np.arange(ROWS, dtype="f4")[:, None] + np.array([0, 0.5, 0.25], dtype="f4")
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", data=x[:101].astype(">f4"), chunks=(8, 3), compression="gzip")
        file.create_dataset("y", data=np.arange(101, dtype="u2"), chunks=(50,))
    with h5py.File(folder / "b.h5", "w") as file:
        file.create_dataset("x", data=x[101:])
        file.create_dataset("y", data=np.arange(101, ROWS, dtype="u2"))
    return [folder / "a.h5", folder / "b.h5"]


def make(paths: list[Path], **options: Any) -> HDF5Loader:
    return HDF5Loader(paths, **{"fields": ("x", "y"), "global_batch": 32, "streams": 4, **options})


def rows(batches: Any) -> list[int]:
    return [row for batch in batches for row in batch.indices.tolist()]
