"""Batches on a GPU: host memory is pinned, and used again only after the copy from it has finished."""

from pathlib import Path

import h5py
import numpy as np
import torch

import mpidp
from mpidp.hdf5.dataset import Rows

ROWS, WIDTH = 4096, 4096


def write(path: Path, world: mpidp.World) -> Path:
    if world.rank == 0:
        with h5py.File(path, "w") as file:
            x = np.arange(ROWS, dtype="f4")[:, None] + np.zeros(WIDTH, "f4")
            file.create_dataset("x", data=x, chunks=(64, WIDTH))
            file.create_dataset("y", data=np.arange(ROWS))
    world.barrier()
    return path


def test_copies_read_what_was_decoded_for_them(world: mpidp.World, mpi_tmp_path: Path) -> None:
    """The stream is kept busy, so that copies wait: memory used again too early would show as other rows."""
    loader = mpidp.HDF5Loader(write(mpi_tmp_path / "a.h5", world), ("x", "y"), 256, world=world)
    kept = []
    for _ in range(3):
        for batch in loader:
            torch.cuda._sleep(2_000_000)
            assert batch.x.device == world.device
            kept.append((batch.x.amin(1), batch.x.amax(1), batch.y, batch.indices))
    for low, high, y, indices in kept:
        rows = torch.from_numpy(indices).to(world.device)
        assert bool((low == rows).all()) and bool((high == rows).all()) and bool((y == rows).all())
    loader.close()


def test_memory_of_batches_is_pinned(world: mpidp.World, mpi_tmp_path: Path) -> None:
    loader = mpidp.HDF5Loader(write(mpi_tmp_path / "a.h5", world), ("x",), 256, world=world)
    rows: Rows = loader._ring().take(8)
    assert torch.from_numpy(rows.fields["x"]).is_pinned()
    loader.close()
