"""Filters x types x layouts on real ranks, in every mode: the values that h5py reads, each row once."""

from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest

from mpidp.hdf5.field import FieldSpec
from mpidp.hdf5.loader import HDF5Loader, Mode
from mpidp.world.world import World

ROWS = 67
# Name, dtype, shape of a sample, options.
KINDS: tuple[tuple[str, str, tuple[int, ...], dict[str, Any]], ...] = (
    ("bool, contiguous", "?", (), {}),
    ("i1, gzip", "i1", (3,), {"chunks": (16, 3), "compression": "gzip"}),
    ("i2, split rows", ">i2", (7, 5), {"chunks": (16, 3, 4), "compression": "lzf", "shuffle": True}),
    ("i4, fletcher32", "<i4", (2,), {"chunks": (17, 2), "fletcher32": True}),
    ("i8, one row", "i8", (), {"chunks": (1,)}),
    ("u1, blosc", "u1", (28,), {"chunks": (20, 28), **hdf5plugin.Blosc()}),
    ("u2, zstd", ">u2", (), {"chunks": (26,), **hdf5plugin.Zstd()}),
    ("u4, taller", "u4", (), {"chunks": (500,), "maxshape": (None,)}),
    ("u8, lz4", "u8", (2,), {"chunks": (9, 1), **hdf5plugin.LZ4()}),
    ("f2, bitshuffle", "f2", (5,), {"chunks": (25, 5), **hdf5plugin.Bitshuffle(cname="lz4")}),
    ("f4, contiguous", ">f4", (4, 3), {}),
    ("f8, gzip", "f8", (11,), {"chunks": (13, 11), "compression": "gzip", "shuffle": True, "fletcher32": True}),
    ("c8, slow", "c8", (2,), {"chunks": (8, 2), **hdf5plugin.Blosc2()}),
    ("c16, gzip", ">c16", (), {"chunks": (10,), "compression": "gzip"}),
)


def values(code: str, shape: tuple[int, ...], start: int, stop: int) -> np.ndarray:
    """What rows [start, stop) hold: the number of the row and of the value, as far as the type can hold it."""
    count = int(np.prod(shape, dtype=int))
    numbers = (np.arange(start, stop)[:, None] * 3 + np.arange(count)) % (2 if code == "?" else 100)
    return numbers.reshape(stop - start, *shape).astype(code)


@pytest.mark.filterwarnings("ignore:.*is read by HDF5, one thread at a time")
@pytest.mark.filterwarnings("ignore:.*mode=.stage. copies to")
@pytest.mark.filterwarnings("ignore:.*a batch of .* comes from about")
@pytest.mark.parametrize("mode", ["stream", "node", "store", "stage"])
def test_equals_h5py(world: World, mpi_tmp_path: Path, mode: Mode) -> None:
    """Behaviours 23 and 27: two files, fields of all kinds at once, one along its last axis, at any number of ranks."""
    paths = [mpi_tmp_path / "a.h5", mpi_tmp_path / "b.h5"]
    parts = ((0, 40), (40, ROWS))
    if world.rank == 0:
        for path, (start, stop) in zip(paths, parts, strict=True):
            with h5py.File(path, "w") as file:
                for name, code, shape, options in KINDS:
                    file.create_dataset(name, data=values(code, shape, start, stop), **options)
                last = np.moveaxis(values("i4", (3,), start, stop), 0, -1)
                file.create_dataset("last", data=last, chunks=(2, 9), compression="gzip")
    world.barrier()
    fields = (*(name for name, *_ in KINDS), FieldSpec("last", axis=-1))
    given: dict[str, Any] = {"mode": mode, "stage_folder": mpi_tmp_path, "threads": 2, "streams": 4, "mixing_chunks": 2}
    loader = HDF5Loader(paths, fields, 10, world=world, **given)
    for _ in range(2):
        seen = []
        for batch in loader:
            seen += [row for rows in world.comm.allgather(batch.indices.tolist()) for row in rows]
            for name, code, shape, _options in (*KINDS, ("last", "i4", (3,), {})):
                expected = values(code, shape, 0, ROWS)[batch.indices]
                np.testing.assert_array_equal(batch[name].numpy(), expected, err_msg=name)
        assert sorted(seen) == list(range(ROWS))
    loader.close()
