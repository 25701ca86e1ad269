"""Rows of fields whose chunks differ in height: the values of h5py; blocks decoded once; failed reads tried again."""

import errno
import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hdf5_rows import read_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidp.errors import DataError
from mpidp.hdf5 import decode
from mpidp.hdf5 import read as rows_module
from mpidp.hdf5.dataset import DataSet
from mpidp.hdf5.field import FieldSpec
from mpidp.hdf5.files import describe as describe_module
from mpidp.hdf5.files.describe import describe
from mpidp.hdf5.read import Cache, RowReader, Selection

ROWS = 700
FIELDS = ("x", "y", "z", FieldSpec("s"), "plain")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chunks of 100, 7, 256 and 1 rows, one field that only HDF5 reads, and one without chunks."""
    path = tmp_path_factory.mktemp("rows") / "a.h5"
    i = np.arange(ROWS)
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=i[:, None] * np.ones(300, "i4"), chunks=(100, 300), compression="gzip")
        file.create_dataset("y", data=i.astype("u2"), chunks=(7,))
        file.create_dataset("z", data=i[:, None] + np.array([0.5, 0.25]), chunks=(256, 1), compression="lzf")
        file.create_dataset("s", data=i, chunks=(64,), scaleoffset=0)
        file["plain"] = i.astype(">f4")
    return path


def expected(name: str, start: int, stop: int) -> np.ndarray:
    i = np.arange(start, stop)
    return {"x": i[:, None] * np.ones(300), "z": i[:, None] + np.array([0.5, 0.25])}.get(name, i)


def read(reader: RowReader, dataset: DataSet, number: int, start: int, stop: int) -> None:
    field = dataset.fields[number]
    into = np.empty((stop - start, *field.shape), field.dtype)
    reader.read_field(0, number, start, stop, into)
    np.testing.assert_array_equal(into, expected(field.dataset, start, stop))


@pytest.mark.parametrize("cache_bytes", [0, 10_000, 64 * 2**20])
@settings(max_examples=40)
@given(ranges=st.lists(st.tuples(st.integers(0, 4), st.integers(0, ROWS - 1), st.integers(1, 300)), max_size=8))
def test_any_ranges(path: Path, cache_bytes: int, ranges: list[tuple[int, int, int]]) -> None:
    """Behaviour 27: with room to keep decoded blocks and without."""
    dataset = describe(path, FIELDS)
    with closing(RowReader(Selection(dataset), cache_bytes)) as reader:
        for number, start, count in ranges:
            read(reader, dataset, number, start, min(start + count, ROWS))


def test_threads_read_side_by_side(path: Path) -> None:
    """Each in buffers of its own; the field that HDF5 reads by one at a time."""
    dataset = describe(path, FIELDS)
    generator = np.random.default_rng(0)
    jobs = [
        (int(generator.integers(5)), int(generator.integers(ROWS)), int(generator.integers(1, 200))) for _ in range(200)
    ]
    with closing(RowReader(Selection(dataset), 30_000)) as reader, ThreadPoolExecutor(4) as pool:
        for job in [pool.submit(read, reader, dataset, n, start, min(start + count, ROWS)) for n, start, count in jobs]:
            job.result()


def test_blocks_that_serve_several_ranges_are_decoded_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taller chunks than the ranges that are read, with room to keep them; without, again for each range."""
    monkeypatch.setattr(describe_module, "_LEAST_RANGE_BYTES", 1)
    monkeypatch.setattr(rows_module, "_SMALL_RANGE_BYTES", 0)
    dataset = describe(path, ("x", "z"))
    assert dataset.files[0].range_rows == 100
    counts: Counter[int] = Counter()
    real = decode.Decoder._block

    def count(self: Any, storage: Any, block: int, *rest: Any) -> Any:
        counts[block] += storage.chunk[1] == 1
        return real(self, storage, block, *rest)

    monkeypatch.setattr(decode.Decoder, "_block", count)
    for cache_bytes, decoded in ((2**20, [1, 1, 1]), (0, [3, 4, 2])):
        counts.clear()
        with closing(RowReader(Selection(dataset), cache_bytes)) as reader:
            for start in range(0, ROWS, 100):
                read(reader, dataset, 1, start, start + 100)
        assert [counts[block] for block in range(3)] == decoded


def test_into_any_memory(path: Path) -> None:
    """Also where the rows of a batch do not lie one after another."""
    dataset = describe(path, ("x",))
    wide = np.zeros((ROWS, 2, 300), dataset.fields[0].dtype)
    with closing(RowReader(Selection(dataset))) as reader:
        reader.read_field(0, 0, 5, ROWS, wide[5:, 1])
    np.testing.assert_array_equal(wide[5:, 1], expected("x", 5, ROWS))
    assert not wide[:, 0].any() and not wide[:5].any()


def test_errors_name_file_dataset_and_rows(path: Path, tmp_path: Path) -> None:
    """Behaviour 29, on the fast path and on the slow one."""
    copy = tmp_path / "b.h5"
    copy.write_bytes(path.read_bytes())
    dataset = describe(copy, ("x", "s"))
    copy.write_bytes(b"")
    into = np.empty((3, 300), "i8")
    with closing(RowReader(Selection(dataset))) as reader:
        with pytest.raises(DataError, match=r'b\.h5: dataset "x", rows 4 to 6: .*b\.h5: ends at byte'):
            reader.read_field(0, 0, 4, 7, into)
        with pytest.raises(DataError, match=r'b\.h5: dataset "s", rows 0 to 699: .*not an HDF5 file: 0 bytes'):
            reader.read_field(0, 1, 4, 7, np.empty(3, "i8"))


def test_a_cache_makes_each_value_once() -> None:
    """A thread that wants what another is making waits for it; errors reach both and are not kept."""
    made: list[str] = []
    started, go_on = threading.Event(), threading.Event()

    def slow() -> str:
        made.append("a")
        started.set()
        assert go_on.wait(30)
        return "value"

    cache: Cache[str, str] = Cache(12, len)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get, "a", slow)
        assert started.wait(30)
        second = pool.submit(cache.get, "a", slow)
        go_on.set()
        assert first.result() == second.result() == "value" and made == ["a"]

    def fails() -> str:
        raise DataError("no")

    for _ in range(2):
        with pytest.raises(DataError):
            cache.get("b", fails)
    assert cache.get("b", lambda: "12345") == "12345"
    assert cache.get("c", lambda: "12345") == "12345"  # "a" was used least recently, so it goes
    assert cache.get("a", lambda: "new") == "new"
    for value in ("longer than all", "again"):  # what is larger than the cache is not kept
        assert cache.get("d", lambda value=value: value) == value


@pytest.mark.parametrize(
    ("failures", "number", "works"), [(2, errno.EIO, True), (2, errno.ESTALE, True), (9, errno.EIO, False)]
)
def test_read_errors_that_may_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, number: int, works: bool
) -> None:
    """Behaviour 29: a bounded number of attempts, each with the file opened anew; then file, dataset and rows."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.arange(10), chunks=(5,))
    dataset = describe(tmp_path / "a.h5", ("x",))
    left, opened, pauses = [failures], [], []
    real_read, real_open = os.preadv, os.open

    def read(*arguments: Any) -> int:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(number, os.strerror(number))
        return real_read(*arguments)

    monkeypatch.setattr("mpidp.hdf5.decode.os.preadv", read)
    monkeypatch.setattr("mpidp.hdf5.decode.os.open", lambda *a: opened.append(a) or real_open(*a))
    monkeypatch.setattr("mpidp.hdf5.decode.time.sleep", pauses.append)
    if works:
        assert read_rows(dataset).tolist() == list(range(10)) and len(opened) == failures + 1 == len(pauses) + 1
    else:
        with pytest.raises(DataError, match=r'a\.h5: dataset "x", rows 0 to 9: \[Errno 5\]'):
            read_rows(dataset)
        assert len(pauses) <= 3


def test_a_page_that_was_wrong_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behaviour 29: what cannot be decoded is read once more before it is called damaged."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.arange(10), chunks=(5,), compression="gzip", fletcher32=True)
    dataset = describe(tmp_path / "a.h5", ("x",))
    real, turns = os.preadv, [0]

    def read(descriptor: int, buffers: list[Any], offset: int) -> int:
        count = real(descriptor, buffers, offset)
        turns[0] += 1
        if turns[0] == 1:
            buffers[0][0] ^= 1
        return count

    monkeypatch.setattr("mpidp.hdf5.decode.os.preadv", read)
    assert read_rows(dataset).tolist() == list(range(10)) and turns[0] >= 2
