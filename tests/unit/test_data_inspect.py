"""`mpidp data inspect`: read amplification by counting, and advice for files that ask for it."""

from pathlib import Path

import h5py
import numpy as np
import pytest
from bad_data import write_one_bad_object
from data_files import run
from hypothesis import given
from hypothesis import strategies as st

from mpidp.hdf5.files.contents import list_datasets
from mpidp.tools.data.inspect import ReadOrder, StoredField, advice, amplification

MIB = 1 << 20


def counted(field: StoredField, num_rows: int, range_rows: int, order: ReadOrder) -> int:
    """Bytes decoded, by going through the reads one by one."""
    if field.chunks is None:
        return num_rows * field.row_bytes
    height = field.chunks[0]
    if order == "none":
        reads = [(0, num_rows)]
    else:
        step = 1 if order == "full" else range_rows
        reads = [(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]
    chunks = sum(len({row // height for row in range(*read)}) for read in reads)
    splits = [-(-length // side) for length, side in zip(field.shape[1:], field.chunks[1:], strict=True)]
    return chunks * int(np.prod(splits)) * int(np.prod(field.chunks)) * field.itemsize


@given(
    num_rows=st.integers(1, 60),
    range_rows=st.integers(1, 20),
    order=st.sampled_from(["streams", "full", "none"]),
    heights=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    width=st.integers(1, 4),
)
def test_amplification_is_what_counting_finds(
    num_rows: int, range_rows: int, order: ReadOrder, heights: list[int], width: int
) -> None:
    fields = [StoredField((num_rows, 5), (height, width), 4) for height in heights]
    fields.append(StoredField((num_rows,), None, 8))
    decoded = sum(counted(field, num_rows, range_rows, order) for field in fields)
    used = num_rows * (20 * len(heights) + 8)
    assert amplification(fields, range_rows, order) == pytest.approx(decoded / used)


def test_inspect_tells_amplification_memory_and_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file.create_dataset("x", data=np.zeros((1000, 256), "f4"), chunks=(100, 64), compression="gzip", shuffle=True)
    assert run("inspect", tmp_path / "in.h5") == 0
    text = capsys.readouterr().out
    assert "decoded   bytes for each byte used, if nothing is kept: streams 1.0, full 100.0, none 1.0" in text
    assert " for those chunks of one stream" in text
    command = f"mpidp data convert {tmp_path / 'in.h5'} NEW.h5 --chunk-rows=16"
    assert f"advice\n  x: chunks split each row into 4 parts, all of which are decoded for one row: {command}" in text
    words = command.split()[2:-2]
    assert run(*words, tmp_path / "out.h5", "--chunk-rows=16") == 0
    capsys.readouterr()
    assert run("inspect", tmp_path / "out.h5") == 0
    assert "advice" not in capsys.readouterr().out


CASES = {
    "large": (
        dict(shape=(40_000, 256), dtype="f4", chunks=(20_000, 256), compression="gzip", shuffle=True),
        "chunks are 19.5 MiB",
    ),
    "small": (dict(shape=(4000, 16), dtype="f4", chunks=(5, 16)), "chunks are 320 B only"),
    "tall": (dict(shape=(10, 16), dtype="f4", chunks=(64, 16), maxshape=(None, 16)), "has 10 rows and chunks of 64"),
    "no shuffle": (dict(shape=(4000, 16), dtype="f4", chunks=(500, 16), compression="gzip"), "without the shuffle"),
    "no gain": (
        dict(shape=(4000, 16), dtype="u1", chunks=(2000, 16), compression="gzip", random=True),
        "compression saves 0%",
    ),
    "float64": (dict(shape=(150_000, 16), dtype="f8", chunks=(4096, 16), compression="lzf", shuffle=True), "float64"),
    "plain": (dict(shape=(300_000, 16), dtype="f4", chunks=(8192, 16)), "is not compressed"),
    "good": (dict(shape=(4000, 16), dtype="f4", chunks=(500, 16), compression="gzip", shuffle=True), ""),
    "contiguous": (dict(shape=(4000, 16), dtype="f4"), ""),
}


@pytest.mark.parametrize("name", CASES)
def test_advice(tmp_path: Path, name: str) -> None:
    """One line for what could be better, and none for a file that is good."""
    arguments, expected = CASES[name]
    arguments = dict(arguments)
    is_random = arguments.pop("random", False)
    shape = arguments["shape"]
    values = np.random.default_rng(0).integers(0, 256, shape) if is_random else np.zeros(shape)
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file.create_dataset("x", data=values.astype(arguments["dtype"]), **arguments)
    lines = advice("in.h5", list_datasets(str(tmp_path / "in.h5")).datasets)
    assert len(lines) == bool(expected), lines
    assert expected in "".join(lines)


def test_advice_on_fields_with_chunks_of_different_heights(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file.create_dataset("x", data=np.zeros((4000, 16), "f4"), chunks=(500, 16), compression="gzip", shuffle=True)
        file.create_dataset("y", data=np.zeros(4000, "i1"), chunks=(4000,))
        file.create_dataset("words", data=["a"] * 4000, chunks=(7,))
    lines = advice("my file.h5", list_datasets(str(tmp_path / "in.h5")).datasets)
    assert len(lines) == 1
    assert lines[0].startswith("chunks differ in their rows (x 500, y 4000)") and "'my file.h5'" in lines[0]


def said_of(path: Path, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    capsys.readouterr()
    assert run("inspect", path) == code
    return capsys.readouterr().out


def test_what_is_read_before_the_first_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All chunks that are mixed; or, where samples are read one by one, a batch."""
    with h5py.File(tmp_path / "mixed.h5", "w") as file:
        file.create_dataset("x", data=np.zeros((64 * 80, 256), "f4"), chunks=(16, 256), compression="gzip")
    assert "first     4.0 MiB are read, by all ranks together" in said_of(tmp_path / "mixed.h5", capsys)
    with h5py.File(tmp_path / "alone.h5", "w") as file:
        file.create_dataset("x", data=np.zeros((100, 1 << 15), "f4"), chunks=(1, 1 << 15))
    assert "first     8.0 MiB are read, by all ranks together" in said_of(tmp_path / "alone.h5", capsys)


def test_a_group_for_each_sample_is_described_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Behaviour 57: the answer does not grow with the file, and says what to do."""
    path = tmp_path / "in.h5"
    with h5py.File(path, "w") as file:
        for number in range(150):
            file[f"run/{number}/x"], file[f"run/{number}/y"] = np.ones((3, 8), "f4"), number
    text = said_of(path, capsys)
    assert len(text.splitlines()) < 20 and "data.fields" not in text
    assert '"run" holds 150 groups, 0, 1, 2 and 147 more; the loader needs one dataset for each field: ' in text
    command = f"mpidp data convert {path} NEW.h5 --stack-groups=run"
    assert text.splitlines()[-1].endswith(command)
    assert run(*command.replace("NEW.h5", str(tmp_path / "out.h5")).split()[2:]) == 0
    assert 'data.fields = ["run/x", "run/y"] would give\n  samples   150' in said_of(tmp_path / "out.h5", capsys)


def test_many_datasets_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with h5py.File(tmp_path / "in.h5", "w") as file:
        for number in range(130):
            file[f"x{number}"] = 1
    text = said_of(tmp_path / "in.h5", capsys)
    assert "and 30 more datasets" in text and text.endswith("and 90 more\n") and len(text.splitlines()) < 120


def test_links_are_listed_with_where_they_lead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with h5py.File(tmp_path / "linked.h5", "w") as file:
        file.create_dataset("all/x", data=np.zeros((64, 8)), chunks=(16, 8), compression="gzip", shuffle=True)
    with h5py.File(tmp_path / "master.h5", "w") as file:
        file["entry/frames"] = h5py.ExternalLink("linked.h5", "/all/x")
        file["entry/group"] = h5py.ExternalLink("linked.h5", "/all")
        file["newest"] = h5py.SoftLink("/entry/frames")
        file["gone"] = h5py.ExternalLink("gone.h5", "/x")
    text = said_of(tmp_path / "master.h5", capsys)
    assert 'data.fields = ["entry/frames"] would give' in text
    assert 'links\n  entry/frames leads to "/all/x" in linked.h5\n  entry/group leads to "/all" in linked.h5\n' in text
    assert 'newest leads to "/entry/frames"\n' in text
    assert 'gone is a link to "/x" in gone.h5, which is not there' in text


def test_what_is_no_field_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Dimensions of netCDF, indices of PyTables, sparse matrices; and values that attributes say are packed."""
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["t"] = np.zeros((20, 2), "i2")
        file["t"].attrs.update({"_FillValue": np.int16(-1), "scale_factor": 0.5})
        file.create_dataset("bnds", (2,), ">f4").make_scale("This is a netCDF dimension but not a netCDF variable.")
        file.create_group("_i_table").attrs["CLASS"] = np.bytes_("TINDEX")
        file["_i_table/sorted"] = np.zeros(20)
        file["X/data"], file["X/indices"], file["X/indptr"] = np.zeros(20), np.zeros(20, "i4"), np.zeros(4, "i4")
        file["X"].attrs.update({"encoding-type": "csr_matrix", "shape": (3, 9)})
    text = said_of(tmp_path / "in.h5", capsys)
    assert 'data.fields = ["t"] would give' in text and text.count("data.fields") == 1
    assert "X is a sparse matrix of 3 x 9 (csr_matrix): no field; write it as one dataset of rows, dense" in text
    assert "bnds: a dimension of netCDF without a variable, no field" in text
    assert "_i_table/sorted: part of an index of PyTables, no field" in text
    assert "_FillValue, scale_factor" in text and "cf = true" in text


def test_damage_is_a_line_that_names_file_and_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Behaviour 57."""
    path = write_one_bad_object(tmp_path / "in.h5")
    text = said_of(path, capsys, code=1)
    assert 'data.fields = ["good"]' in text and f'damaged\n  {path}: "bad" cannot be opened: ' in text
