"""`mpidp train --dry-run` and `mpidp data inspect`: what they say about real files and models."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch import nn

import mpidp
from mpidp.cli import main
from mpidp.config import DataSection, ModelSection, RunConfig
from mpidp.errors import DataError
from mpidp.hdf5.files.contents import list_datasets
from mpidp.tools.data.inspect import inspect
from mpidp.tools.plan import MakeOptimizer, plan, state_ratio
from mpidp.tools.table import size_text, table

ROWS, CHUNK_ROWS = 100, 8


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "points.h5"
    with h5py.File(path, "w") as points:
        x = np.zeros((ROWS, 3), np.float32)
        points.create_dataset("x", data=x, chunks=(CHUNK_ROWS, 3), compression="gzip", shuffle=True)
        points["y"] = np.arange(ROWS, dtype=">u2")
        points.attrs["licence"] = "CC0"
        points["x"].attrs["unit"] = "m"
    return str(path)


def config_of(file: str, **data: object) -> RunConfig:
    section = DataSection(train=(file,), global_batch=10, streams=4, **data)  # type: ignore[arg-type]
    return RunConfig(data=section, model=ModelSection("mlp"))


def lines_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def over(optimizer: Callable[..., torch.optim.Optimizer], **arguments: object) -> MakeOptimizer:
    return lambda module: optimizer(module.parameters(), **arguments)


SGD = over(torch.optim.SGD, lr=0.1)


def test_a_plan_says_what_drop_last_leaves_out(file: str) -> None:
    """Behaviour 23: the last step that is shown is a complete one."""
    section = replace(config_of(file).data, global_batch=16, drop_last=True)
    text = plan(RunConfig(data=section, model=ModelSection("mlp")), nn.Linear(3, 2), SGD, ranks=3)
    assert "steps an epoch  6; 4 samples are left out (drop_last)" in text
    assert [line[:2] for line in lines_of(text) if line and line[0] in ("5", "6")] == [["5", "16"]]
    assert "left out" not in plan(config_of(file, drop_last=True), nn.Linear(3, 2), SGD, ranks=3)


def test_shards_of_a_plan_are_those_of_the_loader(file: str) -> None:
    """Behaviour 23: 4 streams over 3 ranks: rank 0 owns two of them; steps 0, 1, 2 and the last are shown."""
    text = plan(config_of(file), nn.Linear(3, 2), SGD, ranks=3)
    shown = [line for line in lines_of(text) if line and line[0].isdigit() and ":" in line[5]]
    assert [line[:5] for line in shown] == [
        ["0", "10", "2", "5", "0"],  # indices 0-9 in streams 0, 1, 2, 3, 0, 1, 2, 3, 0, 1: rank 0 has streams 0 and 3
        ["1", "10", "2", "5", "0"],
        ["2", "10", "2", "5", "0"],
        ["9", "10", "2", "5", "0"],
    ]
    assert " ".join(shown[0][5:]) == "0: 5, 1: 3, 2: 2"
    assert "samples         100 in 13 chunks" in text
    assert "steps an epoch  10" in text


def test_ranks_without_samples_are_counted(file: str) -> None:
    text = plan(config_of(file, shuffle="none"), nn.Linear(3, 2), SGD, 16)
    first = next(line for line in lines_of(text) if line[:2] == ["0", "10"])
    assert first[2:5] == ["0", "1", "6"]


def test_the_validation_part_is_not_planned(file: str) -> None:
    text = plan(config_of(file, validation_fraction=0.25), nn.Linear(3, 2), SGD, 1)
    assert "samples         75 in" in text
    assert "steps an epoch  8" in text


def test_memory_is_that_of_the_model(file: str) -> None:
    model = nn.Sequential(nn.Linear(1024, 256, bias=False), nn.BatchNorm1d(256, affine=False))
    text = plan(config_of(file), model, over(torch.optim.Adam), ranks=1)
    sizes = {" ".join(line[:-2]): " ".join(line[-2:]) for line in lines_of(text) if len(line) > 2}
    assert sizes["parameters"] == "1.0 MiB"
    assert sizes["optimizer state"] == "2.0 MiB"
    assert sizes["buffers"] == "2.0 KiB"
    assert sizes["largest batch"] == "160 B"  # 10 samples of 3 float32 and a uint16 widened to int32


def test_buckets_are_those_of_the_reducer(file: str) -> None:
    """Two parameters of 4 MiB and one frozen: with buckets of 5 MiB each gets its own."""
    model = nn.ModuleList([nn.Linear(1024, 1024, bias=False) for _ in range(3)])
    model[0].requires_grad_(False)
    config = RunConfig(data=config_of(file).data)
    few = plan(config, model, SGD, 1)
    assert [line for line in lines_of(few) if "float32" in line] == [["0", "float32", "2", "2097154", "8.0", "MiB"]]
    many = RunConfig(data=config.data, reduce=type(config.reduce)(bucket_bytes=5 * 2**20))
    text = plan(many, model, SGD, 1)
    assert [line[2] for line in lines_of(text) if "float32" in line] == ["1", "1"]


@pytest.mark.parametrize(
    ("optimizer", "arguments", "ratio"),
    [
        (torch.optim.SGD, {"lr": 0.1}, 0),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 1),
        (torch.optim.AdamW, {}, 2),
        (torch.optim.AdamW, {"amsgrad": True}, 3),
        (torch.optim.RMSprop, {}, 1),
    ],
)
def test_optimizer_state_is_measured(
    optimizer: type[torch.optim.Optimizer], arguments: dict[str, object], ratio: float
) -> None:
    assert state_ratio(over(optimizer, **arguments)) == ratio


@pytest.mark.job
def test_a_dry_run_needs_no_mpi(file: str, tmp_path: Path) -> None:
    """Behaviour 40: 64 ranks are planned by one process that never loads MPI."""
    words = ["train", f"--data.train={file}", "--model.name=net:make", "--data.global_batch=64"]
    (tmp_path / "net.py").write_text("import torch\ndef make(width=2): return torch.nn.Linear(3, width)\n")
    code = "import sys, mpidp.cli; code = mpidp.cli.main(sys.argv[1:]); print('mpi4py' in sys.modules, code)"
    child = subprocess.run(
        [sys.executable, "-c", code, *words, "--dry-run", "--ranks", "64", "--model.arguments.width=4"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(mpidp.__file__).parents[1])},
        check=True,
    )
    assert child.stdout.startswith("plan for 64 ranks\n")
    assert child.stdout.endswith("False 0\n")
    assert any(line[:5] == ["0", "float32", "2", "34", "136"] for line in lines_of(child.stdout))


def test_a_dry_run_refuses_shards_of_what_cannot_be_divided(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Behaviours 21 and 40: as the run itself would; nobody should wait in a queue for that."""
    words = ["train", f"--data.train={file}", "--model.name=torch.nn:Linear", "--dry-run"]
    words += ["--model.arguments.in_features=3", "--model.arguments.out_features=2", "--optimizer.sharded=true"]
    assert main([*words, "--optimizer.name=AdamW"]) == 0
    assert capsys.readouterr().out.startswith("plan for")
    assert main([*words, "--optimizer.name=Adafactor"]) == 1
    shown = capsys.readouterr()
    assert "Adafactor cannot be sharded" in shown.err and "AdamW" in shown.err and not shown.out


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam", "Muon"])
def test_a_dry_run_refuses_an_optimizer_that_the_run_would_refuse(
    file: str, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    words = ["train", f"--data.train={file}", "--model.name=torch.nn:Linear", "--dry-run", f"--optimizer.name={name}"]
    assert main([*words, "--model.arguments.in_features=3", "--model.arguments.out_features=2"]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and name in shown.err and not shown.out


def test_a_dry_run_under_a_launcher_plans_for_its_ranks_and_speaks_once(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", f"--data.train={file}", "--model.name=cnn", "--dry-run"]
    monkeypatch.setattr("mpidp.world.launch._world", None)  # another test may have started MPI here
    monkeypatch.setenv("PMI_SIZE", "3")
    monkeypatch.setenv("PMI_RANK", "1")
    assert main(words) == 0
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("PMI_RANK", "0")
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("plan for 3 ranks\n")


def test_inspect_shows_how_datasets_lie_in_the_file(file: str) -> None:
    lines = lines_of(inspect(file)[0])
    x = next(line for line in lines if line[:1] == ["x"] and len(line) > 3)
    y = next(line for line in lines if line[:1] == ["y"])
    assert x[:10] == ["x", "100", "x", "3", "float32", "chunked", "8", "x", "3", "13"]
    assert x[10:12] == ["shuffle", "deflate(4)"]
    assert float(x[-1]) > 1
    assert y == ["y", "100", ">u2", "contiguous", "-", "-", "-", "200", "B", "200", "B", "1.00"]
    assert ["licence:", "CC0"] in lines
    assert ["unit:", "m"] in lines


def test_inspect_says_what_the_loader_would_make_of_the_file(file: str) -> None:
    text, _ = inspect(file)
    assert 'data.fields = ["x", "y"] would give\n  samples   100 of 16 B in memory' in text
    assert "13 chunks of 8 rows" in text
    assert "streams   64 by default" in text
    assert "y is stored as uint16, read as int32" in text
    assert "remarks" not in text


def test_inspect_says_why_a_dataset_cannot_be_trained_on(tmp_path: Path) -> None:
    """Behaviour 27, and the table of cases: strings, scalars, holes, MATLAB's axes."""
    with h5py.File(tmp_path / "odd.h5", "w") as odd:
        odd["label"] = ["a", "b"]
        odd["scalar"] = 3.0
        odd["group/deep"] = np.zeros((2, 2))
        odd["empty"] = h5py.Empty("f4")
        odd["matlab"] = np.zeros((2, 2))
        odd["matlab"].attrs["MATLAB_class"] = np.bytes_("double")
        odd.create_dataset("holes", (20, 2), "f4", chunks=(10, 2))[:10] = 1
    text, _ = inspect(str(tmp_path / "odd.h5"))
    assert 'data.fields = ["group/deep", "matlab"]' in text
    remarks = text.split("remarks\n")[1].splitlines()
    for name, reason in [
        ("label", "string"),
        ("scalar", "single value"),
        ("empty", "no dataspace"),
        ("matlab", "MATLAB"),
        ("holes", "1 of its 2 chunks"),
    ]:
        assert any(f'dataset "{name}"' in remark and reason in remark for remark in remarks), name


def test_inspect_of_a_file_without_datasets(tmp_path: Path) -> None:
    h5py.File(tmp_path / "bare.h5", "w").close()
    assert inspect(str(tmp_path / "bare.h5")) == (f"{tmp_path / 'bare.h5'}\n  no datasets", True)


def test_layouts_are_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "layouts.h5", "w") as layouts:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple((4,))
        compact = h5py.h5d.create(layouts.id, b"compact", h5py.h5t.NATIVE_INT32, space, properties)
        compact.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(4, dtype=np.int32))
        layouts["contiguous"] = np.arange(4)
        layouts.create_dataset("unwritten", (4,), "i4")
        layouts.create_dataset("chunked", (4,), "i4", chunks=(2,))
        source = h5py.VirtualSource(layouts["contiguous"])
        virtual = h5py.VirtualLayout((4,), "i8")
        virtual[:] = source
        layouts.create_virtual_dataset("virtual", virtual)
    found = {info.name: info.layout for info in list_datasets(str(tmp_path / "layouts.h5")).datasets}
    expected = {name: name for name in ("chunked", "compact", "contiguous", "virtual")}
    assert found == {**expected, "unwritten": "contiguous"}


def test_inspect_of_what_is_no_hdf5_file_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Behaviour 29."""
    (tmp_path / "no.h5").write_text("hello, this is text")
    with pytest.raises(DataError):
        inspect(str(tmp_path / "no.h5"))
    assert main(["data", "inspect", str(tmp_path / "no.h5")]) == 1
    assert "not an HDF5 file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1.5 * 2**20, "1.5 MiB"), (2**70, "1048576.0 PiB")],
)
def test_sizes_are_readable(num_bytes: float, text: str) -> None:
    assert size_text(num_bytes) == text


def test_tables_align_numbers_right_and_text_left() -> None:
    assert table(("name", "n"), [("a", 1), ("long name", 100)]) == (
        "  name         n\n  a            1\n  long name  100"
    )
    assert table(("name", "n"), []) == "  name  n"
