"""`mpidp data convert`: what it writes, held against h5py's own reading of it."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
from bad_data import write_wild_shape
from data_files import assert_same, error_of, leftovers, read, run
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidp.errors import DataError
from mpidp.hdf5.write import LEVELS, Filters, NewDataset, encode, parse_filters
from mpidp.tools.data.convert import Layout, default_chunk_rows, make_plan
from mpidp.tools.data.hdf5_source import HDF5Source
from mpidp.tools.data.source import SyntheticSource

ROWS = 103
DTYPES = ("?", "i1", "u2", ">i4", "i8", "u8", "f2", "<f4", ">f8", "c8", "S5")


def some_values(dtype: str, rows: int = ROWS) -> Any:
    random = np.random.default_rng(0)
    if dtype == "S5":
        return np.array([b"%d" % number for number in range(rows)], dtype).reshape(rows)
    return random.integers(0, 100, (rows, 3, 2)).astype(dtype)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file of many types, in groups, with attributes, and things that have no rows."""
    path = tmp_path / "source.h5"
    with h5py.File(path, "w") as file:
        for dtype in DTYPES:
            file[f"group/{dtype}"] = some_values(dtype)
        file["group"].attrs["made by"] = "us"
        file.attrs["licence"] = "CC0"
        file["group/i8"].attrs.update({"unit": "m", "scale": np.arange(3.0), "name": np.bytes_("b")})
        file["group/i8"].attrs["refers to"] = file["group"].ref
        file["single"] = 3.5
        file["words"] = ["one", "two"]
        file["nothing"] = h5py.Empty("f4")
        file["no rows"] = np.zeros((0, 4), "f4")
        file["enum"] = np.arange(ROWS, dtype="u1") % 2
        compound = np.zeros(ROWS, [("a", "f4"), ("b", "i2", 3)])
        compound["a"], compound["b"] = np.arange(ROWS), np.arange(3 * ROWS).reshape(ROWS, 3)
        file.create_dataset("compound", data=compound, chunks=(10,), compression="lzf")
        file.create_dataset("enumerated", data=file["enum"][:], dtype=h5py.enum_dtype({"NO": 0, "YES": 1}, "u1"))
    return path


def test_everything_in_an_hdf5_file_arrives(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Behaviour 27: every type; attributes, groups and what has no rows are kept."""
    assert run("convert", source, tmp_path / "out.h5", "--chunk-rows=10", "--workers=1") == 0
    said = capsys.readouterr()
    assert "copied as they are: no rows, nothing, single, words" in said.err
    expected, found = read(source), read(tmp_path / "out.h5")
    assert set(found) == set(expected)
    for name, values in found.items():
        if isinstance(values, np.ndarray) and values.dtype != object:
            assert_same(values, expected[name])
    with h5py.File(tmp_path / "out.h5") as file, h5py.File(source) as old:
        assert file["group/i8"].chunks == (10, 3, 2) and file["group/i8"].compression == "gzip"
        assert dict(file.attrs) == {"licence": "CC0"} and dict(file["group"].attrs) == {"made by": "us"}
        assert set(file["group/i8"].attrs) == {"unit", "scale", "name", "refers to"}
        assert file[file["group/i8"].attrs["refers to"]] == file["group"]
        assert file["group/i8"].attrs["scale"].tolist() == [0, 1, 2]
        assert h5py.check_enum_dtype(file["enumerated"].dtype) == {"NO": 0, "YES": 1}
        assert file["group/>f8"].id.get_type().equal(old["group/>f8"].id.get_type())
        assert file["single"][()] == 3.5 and file["words"][:].tolist() == [b"one", b"two"]
        assert file["nothing"].shape is None and file["no rows"].shape == (0, 4)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("compression", LEVELS)
@pytest.mark.parametrize("checked", [False, True])
def test_filters(tmp_path: Path, compression: str, checked: bool) -> None:
    """Behaviour 27: each is in the file as asked, and h5py reads the same values."""
    pytest.importorskip("hdf5plugin")
    np.save(tmp_path / "x.npy", some_values("f4"))
    options = [f"--compression={compression}", "--chunk-rows=16", "--workers=1", *["--fletcher32"] * checked]
    assert run("convert", tmp_path / "x.npy", tmp_path / "out.h5", *options) == 0
    assert_same(read(tmp_path / "out.h5")["x"], some_values("f4"))
    with h5py.File(tmp_path / "out.h5") as file:
        plist = file["x"].id.get_create_plist()
        identifiers = [plist.get_filter(number)[0] for number in range(plist.get_nfilters())]
        assert file["x"].fletcher32 is checked
        assert len(identifiers) == checked + (0 if compression == "none" else 1 if "blosc" in compression else 2)


@pytest.mark.parametrize("rows", [0, 1, 2, 15, 16, 17, 33])
@pytest.mark.parametrize("chunk_rows", [1, 16, 1000])
def test_edge_sizes(tmp_path: Path, rows: int, chunk_rows: int) -> None:
    x, y = some_values(">f4", rows), np.arange(rows)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    paths = [tmp_path / "x.npy", tmp_path / "y.npy", tmp_path / "out.h5"]
    assert run("convert", *paths, f"--chunk-rows={chunk_rows}", "--workers=1") == 0
    found = read(tmp_path / "out.h5")
    assert_same(found["x"], x)
    assert_same(found["y"], y)
    with h5py.File(tmp_path / "out.h5") as file:
        height = max(1, min(chunk_rows, rows))
        assert file["x"].chunks == (height, 3, 2) and file["y"].chunks == (height,)
        assert file["x"].id.get_num_chunks() == -(-rows // height)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 40), width=st.integers(1, 5), chunk_rows=st.integers(1, 45), level=st.integers(0, 9))
def test_encoded_chunks_are_those_that_hdf5_writes(rows: int, width: int, chunk_rows: int, level: int) -> None:
    """Byte for byte, the padded last chunk included."""
    values = np.random.default_rng(rows).integers(0, 9, (rows, width))
    new = NewDataset("x", values.shape, values.dtype, chunk_rows)
    with h5py.File("expected", "w", driver="core", backing_store=False) as file:
        whole = file.create_dataset(
            "x",
            data=values,
            chunks=(chunk_rows, width),
            maxshape=(None, None),
            compression=level,
            shuffle=True,
            fletcher32=True,
        )
        file.flush()
        expected = [whole.id.read_direct_chunk((start, 0)) for start in range(0, rows, chunk_rows)]
    assert encode(values, new, Filters("gzip", level, shuffle=True, fletcher32=True)) == expected


@pytest.mark.parametrize("compression", ["gzip", "lzf"])
def test_several_workers_write_the_same_bytes_as_one(tmp_path: Path, compression: str) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).integers(0, 50, (3000, 1000)))
    for workers in (1, 4):
        words = [tmp_path / "x.npy", tmp_path / f"{workers}.h5", f"--workers={workers}", f"--compression={compression}"]
        assert run("convert", *words) == 0
    one, two = (tmp_path / f"{workers}.h5" for workers in (1, 4))
    assert one.read_bytes() == two.read_bytes()
    assert_same(read(one)["x"], np.load(tmp_path / "x.npy"))


def test_shuffled_rows_are_a_permutation_shared_by_all_datasets(tmp_path: Path) -> None:
    number = np.arange(1000)
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file.create_dataset("x", data=np.stack([number, -number], axis=1), chunks=(7, 1), compression="gzip")
        file["y"] = number
    for name, seed, workers in (("a", 1, 1), ("b", 1, 2), ("c", 2, 1)):
        words = [f"--shuffle-rows={seed}", f"--workers={workers}", "--memory=8KiB", "--chunk-rows=30"]
        assert run("convert", tmp_path / "in.h5", tmp_path / f"{name}.h5", *words) == 0
    a, b, c = (read(tmp_path / f"{name}.h5") for name in "abc")
    assert a["y"].tolist() == b["y"].tolist() != c["y"].tolist()
    assert sorted(a["y"]) == sorted(c["y"]) == number.tolist() and a["y"].tolist() != number.tolist()
    assert a["x"].tolist() == [[n, -n] for n in a["y"].tolist()]


def test_datasets_of_different_length_are_not_shuffled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "in.npz", train=np.zeros(5), test=np.zeros(3))
    error = error_of(capsys, "convert", tmp_path / "in.npz", tmp_path / "out.h5", "--shuffle-rows=0", code=2)
    assert '"train" has 5, "test" has 3' in error and "--fields" in error


def test_npz_all_or_some(tmp_path: Path) -> None:
    arrays = {"a": np.arange(6.0).reshape(3, 2), "b": np.asfortranarray(np.arange(12).reshape(4, 3))}
    np.savez_compressed(tmp_path / "in.npz", **arrays)
    assert run("convert", tmp_path / "in.npz", tmp_path / "all.h5") == 0
    assert run("convert", tmp_path / "in.npz", tmp_path / "some.h5", "--fields=b", "--shuffle-rows=4") == 0
    found, some = read(tmp_path / "all.h5"), read(tmp_path / "some.h5")
    assert list(some) == ["b"] and sorted(some["b"].tolist()) == arrays["b"].tolist()
    for name, values in arrays.items():
        assert_same(found[name], values)
    assert leftovers(tmp_path) == []


def test_an_archive_is_not_unpacked_where_it_has_no_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behaviour 56: zeros are packed a thousandfold."""
    np.savez_compressed(tmp_path / "in.npz", a=np.zeros(1000), b=np.zeros(10))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    error = error_of(capsys, "convert", tmp_path / "in.npz", tmp_path / "out.h5", code=1)
    assert f"in.npz: its arrays have 8,336 bytes, and {tmp_path} has 1,000 free; choose --fields" in error
    assert run("convert", tmp_path / "in.npz", tmp_path / "out.h5", "--fields=b") == 0


def test_default_chunks() -> None:
    """Half a MiB where there is much, 64 chunks where there is less, never less than a row."""
    assert default_chunk_rows(10**9, 1 << 10) == 512
    assert default_chunk_rows(6400, 1 << 10) == 100
    assert default_chunk_rows(100, 1 << 10) == 16
    assert default_chunk_rows(100, 1 << 30) == 1
    assert default_chunk_rows(3, 1) == 3
    assert default_chunk_rows(0, 8) == 1


@given(rows=st.integers(0, 500), chunk_rows=st.integers(0, 70), memory=st.integers(1, 10**4), seed=st.integers(0, 9))
def test_tasks_cover_every_row_once_and_begin_with_a_chunk(rows: int, chunk_rows: int, memory: int, seed: int) -> None:
    source = SyntheticSource(["x:float32:5", "y:int64"], rows, 3, 0)
    plan = make_plan(source, Layout(Filters(), chunk_rows, 0, seed), memory, 2)
    taken = [row for task in plan.tasks for row in plan.rows(task).tolist()]
    assert sorted(taken) == list(range(rows))
    assert all(task.start % task.group.chunk_rows == 0 for task in plan.tasks)


def test_large_chunks_of_the_source_are_read_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks hold several of them, as memory allows."""
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file.create_dataset("x", data=np.arange(4_000_000).reshape(-1, 8), chunks=(125_000, 8), compression="lzf")
    source = HDF5Source(str(tmp_path / "in.h5"), ())
    plan = make_plan(source, Layout(Filters()), 1 << 30, 2)
    assert len(plan.tasks) == 2 and plan.datasets[0].chunk_rows == 7812
    plan = make_plan(source, Layout(Filters()), 100 << 20, 2)
    assert plan.groups[0].task_rows == 20 * 7812
    assert len(plan.tasks) == 4


def output_of(code: str, *words: str) -> str:
    """What the command line prints in a process of its own, and then some code."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    code = f"import sys, mpidp.cli; mpidp.cli.main(sys.argv[1:]); {code}"
    words = ("data", "convert", *words)
    return subprocess.run(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True, env=environment
    ).stdout


@pytest.mark.job
def test_memory_is_bounded(tmp_path: Path) -> None:
    """A process that converts 256 MiB at 4 MiB a task stays far below that."""
    with h5py.File(tmp_path / "in.h5", "w") as file:
        x = file.create_dataset("x", (1 << 15, 1 << 11), "f4", chunks=(256, 1 << 11))
        for start in range(0, 1 << 15, 1 << 11):
            x[start : start + (1 << 11)] = np.random.default_rng(start).random((1 << 11, 1 << 11), np.float32)
    code = "print(*[line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')])"
    said = output_of(code, str(tmp_path / "in.h5"), str(tmp_path / "out.h5"), "--workers=1", "--compression=none")
    assert int(said.split()[-1]) < 160 << 10, said


def test_an_existing_target_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", np.arange(5))
    (tmp_path / "out.h5").write_text("mine")
    assert "--overwrite" in error_of(capsys, "convert", tmp_path / "x.npy", tmp_path / "out.h5", code=2)
    assert (tmp_path / "out.h5").read_text() == "mine"
    assert run("convert", tmp_path / "x.npy", tmp_path / "out.h5", "--overwrite") == 0
    assert read(tmp_path / "out.h5")["x"].tolist() == [0, 1, 2, 3, 4]


def _npy(folder: Path, values: Any) -> Path:
    np.save(folder / "x.npy", values, allow_pickle=True)
    return folder / "x.npy"


def _holes(folder: Path) -> Path:
    with h5py.File(folder / "in.h5", "w") as file:
        file.create_dataset("x", (20, 2), "f4", chunks=(10, 2))[:10] = 1
    return folder / "in.h5"


def _damaged(folder: Path) -> Path:
    path = folder / "in.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.arange(1000), chunks=(100,), fletcher32=True)
        place = file["x"].id.get_chunk_info(3).byte_offset
    with open(path, "r+b") as raw:
        raw.seek(place)
        raw.write(b"damage")
    return path


def _virtual(folder: Path) -> Path:
    layout = h5py.VirtualLayout((4,), "i8")
    layout[:] = h5py.VirtualSource(folder / "gone.h5", "x", (4,))
    with h5py.File(folder / "in.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    return folder / "in.h5"


BAD_SOURCES = {
    "objects": (lambda folder: _npy(folder, np.array([{}, []], object)), "cannot be read as .npy"),
    "unicode": (lambda folder: _npy(folder, np.array(["a"])), "has type <U1"),
    "scalar": (lambda folder: _npy(folder, np.float32(1)), "single value"),
    "no values": (lambda folder: _npy(folder, np.zeros((3, 0))), "has rows of shape .* without values"),
    "holes": (_holes, "1 of its 2 chunks was never written"),
    "damaged": (_damaged, r'dataset "x", rows 300 to 399 cannot be read; mpidp data verify'),
    "virtual": (_virtual, "virtual dataset over .*gone.h5; --expand-external"),
    "wild shape": (lambda folder: write_wild_shape(folder / "in.h5"), "its shape .* asks for .* chunks; 11 exist"),
}


@pytest.mark.parametrize("kind", BAD_SOURCES)
def test_sources_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    """Behaviour 29: one message that names file and dataset; no target, and nothing invented for what is missing."""
    make, message = BAD_SOURCES[kind]
    path = make(tmp_path)
    error = error_of(capsys, "convert", path, tmp_path / "out.h5", "--workers=1", code=1)
    assert str(path) in error or kind == "no values"
    assert pytest.RaisesExc(DataError, match=message).matches(DataError(error))
    assert not (tmp_path / "out.h5").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x.npy"], "SOURCE and TARGET"),
        (["no.npy", "out.h5"], "no such file"),
        (["x.npy", "out.h5", "--chunk-bytes=many"], "512KiB"),
        (["x.npy", "out.txt"], "ends in .h5"),
        (["x.npy", "no/out.h5"], "there is no folder"),
        (["x.npy", "."], "ends in .h5"),
        (["x.npy", "x.npy", "out.h5"], 'both become dataset "x"'),
        (["x.npy", "x.pkl", "out.h5"], "unknown kind of source"),
        (["in.h5", "in.h5"], "source and target"),
        (["x.npy", "out.h5", "--compression=rar"], "known are none, gzip"),
        (["x.npy", "out.h5", "--compression=gzip:11"], "a level from 0 to 9"),
        (["x.npy", "out.h5", "--compression=lzf:1"], "has no levels"),
        (["x.npy", "out.h5", "--chunk-rows=5", "--chunk-bytes=1MiB"], "give one of them"),
        (["x.npy", "out.h5", "--chunk-rows=-5"], "expected a number of rows"),
        (["x.npy", "out.h5", "--workers=-1"], "number of threads"),
        (["x.npy", "out.h5", "--label=y"], "is for sources of kind csv; this one is npy"),
        (["x.npy", "out.h5", "--shuffle-rows=-1"], "seed is -1"),
        (["in.h5", "out.h5", "--fields=x,x"], "give each only once"),
        (["in.h5", "out.h5", "--fields=x"], 'no dataset "x"'),
        (["in.h5", "out.h5"], "holds no datasets"),
        (["nested.npz", "out.h5"], '"a" and "a/b" cannot both be'),
    ],
)
def test_command_lines_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.arange(5))
    Path("x.pkl").touch()
    np.savez("nested.npz", **{"a": np.zeros(3), "a/b": np.zeros(3)})
    h5py.File("in.h5", "w").close()
    assert run("convert", *words) in (1, 2)
    assert message in capsys.readouterr().err
    assert not Path("out.h5").exists()
    assert leftovers(tmp_path) == []


def test_under_a_launcher_it_asks_to_be_started_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.setenv("PMI_RANK", "0")
    assert "start it without mpiexec" in error_of(capsys, "convert", "x.npy", "out.h5", code=2)


def test_without_hdf5plugin_gzip_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hdf5plugin", None)
    with pytest.raises(ValueError, match=r"pip install hdf5plugin, or use gzip"):
        parse_filters("zstd:3", shuffle=True, fletcher32=False)


@pytest.mark.job
def test_it_loads_neither_torch_nor_mpi(tmp_path: Path) -> None:
    """Behaviour 40."""
    np.save(tmp_path / "x.npy", np.arange(5))
    code = "print({'torch', 'mpi4py'} & set(sys.modules))"
    assert output_of(code, str(tmp_path / "x.npy"), str(tmp_path / "out.h5")).endswith("decoded\nset()\n")
