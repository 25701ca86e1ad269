"""`mpidp data inspect`: read amplification by counting, and advice for files that ask for it."""

from pathlib import Path

import h5py
import numpy as np
import pytest
from data_files import run
from hypothesis import given
from hypothesis import strategies as st

from mpidp.hdf5.files.listing import list_datasets
from mpidp.tools.inspect.advice import advice
from mpidp.tools.inspect.amplification import Order, StoredField, amplification

MIB = 1 << 20


def counted(field: StoredField, num_rows: int, range_rows: int, order: Order) -> int:
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
    order=st.sampled_from(["lanes", "full", "none"]),
    heights=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    width=st.integers(1, 4),
)
def test_amplification_is_what_counting_finds(
    num_rows: int, range_rows: int, order: Order, heights: list[int], width: int
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
    assert "decoded   bytes for each byte used, if nothing is kept: lanes 1.0, full 100.0, none 1.0" in text
    assert " for those chunks of one lane" in text
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
