"""Filters x types x layouts x edges: what the loader returns is what h5py reads, each pair of them at least once."""

from itertools import combinations, product
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
from hdf5_rows import same_as_h5py

from mpidp.hdf5.field import FieldSpec

FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "shuffle": {"shuffle": True},
    "gzip": {"compression": "gzip"},
    "gzip, shuffle, fletcher32": {"compression": "gzip", "shuffle": True, "fletcher32": True},
    "fletcher32": {"fletcher32": True},
    "lzf, shuffle": {"compression": "lzf", "shuffle": True},
    "blosc": dict(hdf5plugin.Blosc(cname="lz4")),
    "blosc, fletcher32": {**hdf5plugin.Blosc(cname="zstd", shuffle=2), "fletcher32": True},
    "zstd": dict(hdf5plugin.Zstd()),
    "lz4, shuffle": {**hdf5plugin.LZ4(), "shuffle": True},
    "bitshuffle": dict(hdf5plugin.Bitshuffle(cname="none")),
    "bitshuffle lz4": dict(hdf5plugin.Bitshuffle(cname="lz4")),
    "bitshuffle zstd": dict(hdf5plugin.Bitshuffle(cname="zstd")),
    "blosc2": dict(hdf5plugin.Blosc2()),
}
DTYPES = ("?", "i1", "<i2", ">i4", "i8", "u1", ">u2", "u4", "u8", "<f2", ">f4", "f8", "c8", ">c16")
# Shape of a sample; shape of a chunk, whose first number counts samples.
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "vector of numbers": ((), (16,)),
    "whole rows": ((6, 5), (16, 6, 5)),
    "one row": ((30,), (1, 30)),
    "split rows": ((7, 9), (16, 3, 9)),
    "split along two axes": ((7, 9), (5, 4, 4)),
    "column": ((13,), (40, 1)),
    "taller than the data": ((3,), (500, 3)),
}
# Rows: one, one less than a chunk, a chunk, one more, and some.
ROWS = (1, 15, 16, 17, 83)
AXES = (0, -1)
FACTORS = (tuple(FILTERS), DTYPES, tuple(LAYOUTS), ROWS, AXES)


def covering() -> list[tuple[Any, ...]]:
    """Cases of which each pair of values of two factors is in at least one; greedy."""
    pairs = {
        ((a, x), (b, y)) for a, b in combinations(range(len(FACTORS)), 2) for x, y in product(FACTORS[a], FACTORS[b])
    }
    cases = []
    generator = np.random.default_rng(0)
    while pairs:
        (a, x), (b, y) = min(pairs, key=str)
        best: tuple[Any, ...] = ()
        gained: set[Any] = set()
        for _ in range(20):
            case = [values[generator.integers(len(values))] for values in FACTORS]
            case[a], case[b] = x, y
            gain = pairs & set(combinations(enumerate(case), 2))
            if len(gain) > len(gained):
                best, gained = tuple(case), gain
        pairs -= gained
        cases.append(best)
    return cases


def stored_values(code: str, shape: tuple[int, ...]) -> np.ndarray:
    """Values of which some bytes repeat and some do not; within what int64 holds."""
    generator = np.random.default_rng(len(shape) + shape[0])
    values = generator.integers(0, 2 if code == "?" else 100, shape)
    values[: shape[0] // 2] = 1
    return values.astype(code) * (1 if code[-2:] not in ("c8", "16") else np.array(1 - 2j, code))


def test_all_pairs_are_covered() -> None:
    cases = covering()
    assert len(cases) < 400
    seen = {pair for case in cases for pair in combinations(enumerate(case), 2)}
    for a, b in combinations(range(len(FACTORS)), 2):
        assert all(((a, x), (b, y)) in seen for x, y in product(FACTORS[a], FACTORS[b]))


@pytest.mark.parametrize("part", range(8))
def test_equals_h5py(tmp_path: Path, part: int) -> None:
    """Behaviour 27."""
    for number, (filters, code, layout, rows, axis) in enumerate(covering()[part::8]):
        path = tmp_path / f"{filters}, {code}, {layout}, {rows}, {axis}.h5"
        row_shape, chunk = LAYOUTS[layout]
        values = np.moveaxis(stored_values(code, (rows, *row_shape)), 0, axis)
        chunks = tuple(np.moveaxis(np.empty(chunk, "V0"), 0, axis).shape)
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=values, chunks=chunks, maxshape=(None,) * values.ndim, **FILTERS[filters])
        dataset = same_as_h5py(path, FieldSpec("x", axis=axis), cache_bytes=0 if number % 2 else 2**20)
        assert bool(dataset.files[0].slow[0]) == (filters == "blosc2"), dataset.files[0].slow
        path.unlink()


@pytest.mark.parametrize("code", DTYPES)
def test_without_chunks(tmp_path: Path, code: str) -> None:
    """Behaviour 27: contiguous and compact, each edge size."""
    for number, rows in enumerate(ROWS):
        values = stored_values(code, (rows, 3))
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["contiguous"] = values
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_layout(h5py.h5d.COMPACT)
            kind, space = h5py.h5t.py_create(values.dtype, logical=True), h5py.h5s.create_simple(values.shape)
            h5py.Dataset(h5py.h5d.create(file.id, b"compact", kind, space, plist))[...] = values
        for name in ("contiguous", "compact"):
            assert same_as_h5py(tmp_path / f"{number}.h5", name).files[0].slow == ("",)
