"""Chunks as HDF5 and its plugins write them: what undoing their filters without HDF5 gives, and what it refuses."""

import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest

from mpidp.errors import DataError
from mpidp.hdf5 import filters
from mpidp.hdf5.dataset import Filter
from mpidp.hdf5.files.locate import filters_of
from mpidp.hdf5.filters import Scratch, inflater, obstacle, undo

BLOSC = ("blosclz", "lz4", "lz4hc", "zlib", "zstd")
PIPELINES: dict[str, dict[str, Any]] = {
    "none": {},
    "shuffle": {"shuffle": True},
    "gzip": {"compression": "gzip"},
    "gzip 9, shuffle": {"compression": "gzip", "compression_opts": 9, "shuffle": True},
    "fletcher32": {"fletcher32": True},
    "gzip, shuffle, fletcher32": {"compression": "gzip", "shuffle": True, "fletcher32": True},
    "lzf": {"compression": "lzf"},
    "lzf, shuffle, fletcher32": {"compression": "lzf", "shuffle": True, "fletcher32": True},
    **{f"blosc {name}": dict(hdf5plugin.Blosc(cname=name, shuffle=place % 3)) for place, name in enumerate(BLOSC)},
    "blosc, fletcher32": {**hdf5plugin.Blosc(), "fletcher32": True},
    "zstd": dict(hdf5plugin.Zstd()),
    "zstd, shuffle": {**hdf5plugin.Zstd(clevel=9), "shuffle": True},
    "lz4": dict(hdf5plugin.LZ4()),
    "lz4, small blocks": dict(hdf5plugin.LZ4(nbytes=64)),
    "bitshuffle": dict(hdf5plugin.Bitshuffle(cname="none")),
    "bitshuffle lz4": dict(hdf5plugin.Bitshuffle(cname="lz4")),
    "bitshuffle zstd": dict(hdf5plugin.Bitshuffle(cname="zstd")),
    "bitshuffle, small blocks": dict(hdf5plugin.Bitshuffle(nelems=8, cname="lz4")),
}
DTYPES = ("u1", "<i2", ">f4", "f8", "c16")
# Elements of a chunk: one, an odd number, a multiple of 8, and more than a block of any codec.
LENGTHS = (1, 13, 64, 20011)


def values_of(code: str, count: int, pattern: str) -> np.ndarray:
    dtype = np.dtype(code)
    if pattern == "random":
        return np.random.default_rng(count).integers(0, 256, count * dtype.itemsize).astype("u1").view(dtype)
    return (np.arange(count) // 7).astype(dtype)


def chunk_of(path: Path, values: np.ndarray, options: dict[str, Any]) -> tuple[tuple[Filter, ...], int, bytes]:
    """The filters, the mask and the bytes of the one chunk that holds `values`."""
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("x", data=values, chunks=values.shape, **options)
        mask, raw = dataset.id.read_direct_chunk((0,))
        return filters_of(dataset.id.get_create_plist()), mask, raw


@pytest.mark.parametrize("pattern", ["steps", "random"])
@pytest.mark.parametrize("name", PIPELINES)
def test_undone(tmp_path: Path, name: str, pattern: str) -> None:
    """Behaviour 27: bytes of every pipeline; those of random data are often stored as they are, and masked."""
    scratch = Scratch()
    for number, code in enumerate(DTYPES):
        for length in LENGTHS:
            values = values_of(code, length, pattern)
            filters, mask, raw = chunk_of(tmp_path / f"{number}.h5", values, PIPELINES[name])
            assert not obstacle(filters)
            for into in (None, np.empty(values.nbytes, np.uint8)):
                found = undo(np.frombuffer(raw, np.uint8), filters, mask, values.nbytes, scratch, into)
                assert found.tobytes() == values.tobytes(), (code, length)
                assert into is None or found is into


@pytest.mark.parametrize("skipped", [0b01, 0b10, 0b11])
def test_filters_that_were_skipped(tmp_path: Path, skipped: int) -> None:
    """Each chunk says which filters were left out when it was written."""
    values = np.arange(100, dtype="i4")
    filters, *_ = chunk_of(tmp_path / "a.h5", values, {"compression": "gzip", "shuffle": True})
    shuffled = values.view("u1").reshape(-1, 4).T.tobytes()
    stored = {0b01: None, 0b10: shuffled, 0b11: values.tobytes()}[skipped]
    if stored is None:
        _, _, stored = chunk_of(tmp_path / "b.h5", values, {"compression": "gzip"})
    found = undo(np.frombuffer(stored, np.uint8), filters, skipped, values.nbytes, Scratch(), None)
    assert found.tobytes() == values.tobytes()


@pytest.mark.parametrize("name", [name for name in PIPELINES if name not in ("none", "shuffle", "bitshuffle")])
def test_damage_is_no_data(tmp_path: Path, name: str) -> None:
    """Behaviour 29: cut short, or not of this filter at all: an error, and never other values than were written."""
    values = values_of("f4", 20011, "steps")
    filters, mask, raw = chunk_of(tmp_path / "a.h5", values, PIPELINES[name])
    zeros = [] if name == "fletcher32" else [bytes(len(raw))]  # whose checksum is 0: HDF5 too takes them for values
    for damaged in (raw[: len(raw) // 2], raw[:3], *zeros):
        with pytest.raises(DataError):
            undo(np.frombuffer(damaged, np.uint8), filters, mask, values.nbytes, Scratch(), None)


@pytest.mark.parametrize("length", [13, 64])
def test_checksums_are_compared(tmp_path: Path, length: int) -> None:
    """Behaviour 29: one bit that flipped, in the values or in the checksum."""
    filters, mask, raw = chunk_of(tmp_path / "a.h5", np.arange(length, dtype="u1"), {"fletcher32": True})
    for place in (0, length - 1, length, length + 3):
        damaged = bytearray(raw)
        damaged[place] ^= 4
        with pytest.raises(DataError, match=r"checksum fletcher32 is 0x[0-9a-f]{8}, stored was 0x"):
            undo(np.frombuffer(damaged, np.uint8), filters, mask, length, Scratch(), None)


def test_a_chunk_of_another_size(tmp_path: Path) -> None:
    filters, mask, raw = chunk_of(tmp_path / "a.h5", np.zeros(8), {})
    with pytest.raises(DataError, match="a chunk of 72 bytes decodes to 64"):
        undo(np.frombuffer(raw, np.uint8), filters, mask, 72, Scratch(), None)


def test_blocks_of_no_bytes() -> None:
    """Behaviour 56: sizes that a chunk gives of its own blocks are checked before there is a loop over them."""
    step = Filter(32008, "bitshuffle", (0, 4, 4, 0, 2))
    for block_bytes in (0, 1, 2**32 - 1):
        raw = struct.pack(">QI", 64, block_bytes) + bytes(400)
        with pytest.raises(DataError, match=f"bitshuffle has blocks of {block_bytes} bytes"):
            undo(np.frombuffer(raw, np.uint8), (step,), 0, 64, Scratch(), None)


def test_zlib_makes_no_more_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behaviour 56: some kilobytes may not become gigabytes."""
    monkeypatch.setattr(filters, "imagecodecs", None)
    raw = np.frombuffer(zlib.compress(bytes(10**7)), np.uint8)
    with pytest.raises(DataError, match="a chunk of 1000 bytes decodes to 1001"):
        undo(raw, (Filter(1, "deflate", ()),), 0, 1000, Scratch(), None)


def test_scratch_keeps_the_buffer_before() -> None:
    scratch = Scratch()
    first = scratch.buffer(10)
    first[:] = 1
    second = scratch.buffer(1000)
    second[:] = 2
    assert (first == 1).all()
    assert scratch.buffer(5).base is first.base


WITHOUT = """
import sys
import warnings
sys.modules["imagecodecs"] = None
import numpy as np
from mpidp.hdf5 import loader
from mpidp.hdf5.filters import inflater
from mpidp.hdf5.loader import HDF5Loader
assert inflater() == "zlib"
for name in sys.argv[2:]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batch = next(iter(HDF5Loader(sys.argv[1], (name,), 40, shuffle="none")))
    assert batch[name].tolist() == list(range(40)), name
    print(name, *(str(each.message).split("time: ")[1] for each in caught), sep="|")
"""


@pytest.mark.job
def test_without_imagecodecs(tmp_path: Path) -> None:
    """Every module imports; deflate and shuffle are undone by zlib and NumPy, the rest by HDF5, with the reason."""
    assert inflater() == "libdeflate"
    names = {"plain": {}, "gzip": {"compression": "gzip", "shuffle": True}, "lzf": {"compression": "lzf"}}
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, options in (names | {"sum": {"fletcher32": True}, "zstd": dict(hdf5plugin.Zstd())}).items():
            file.create_dataset(name, data=np.arange(40), chunks=(8,), **options)
    arguments = [sys.executable, "-c", WITHOUT, str(tmp_path / "a.h5"), "plain", "gzip", "lzf", "sum", "zstd"]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    needs = "needs imagecodecs: pip install imagecodecs"
    lines = ["plain", "gzip", f"lzf|filter lzf {needs}", f"sum|filter fletcher32 {needs}", f"zstd|filter zstd {needs}"]
    assert ended.stdout.splitlines() == lines
