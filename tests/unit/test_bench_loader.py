"""`mpidp bench loader`: every side reads the right rows, and the report says what was measured."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpidp.cli import main
from mpidp.errors import MpidpError
from mpidp.hdf5.files.describe import describe
from mpidp.tools.bench.loader import _passes

ROWS = 300


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "a.h5"
    with h5py.File(path, "w") as file:
        x = np.arange(ROWS * 6, dtype="u2").reshape(ROWS, 6)
        file.create_dataset("x", data=x, chunks=(32, 6), compression="gzip", shuffle=True)
        file.create_dataset("y", data=np.arange(ROWS))
    return path


def test_the_report_as_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "loader", str(path), "--global-batch=50", "--repeats=2", "--samples=200", "--json"]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in report["rows"]] == [
        "raw read",
        "ceiling",
        "mpidp streams",
        "mpidp full",
        "mpidp none",
    ]
    for row in report["rows"]:
        assert 0 < row["min_samples_per_s"] <= row["samples_per_s"] <= row["max_samples_per_s"]
        assert row["of_ceiling"] > 0
    assert report["samples"] == 200
    assert 1 <= report["rows"][2]["chunks_per_batch"] <= 10


def test_a_table_with_one_order_and_a_cold_cache(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "bench",
                "loader",
                str(path),
                "--shuffles=none",
                "--global-batch=50",
                "--samples=300",
                "--repeats=1",
                "--cold",
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "page cache dropped before each repeat" in text
    assert "mpidp none" in text
    assert "mpidp streams" not in text


@pytest.mark.parametrize(
    "words", [["--repeats=0"], ["--samples=0"], ["--shuffles=streams,streams"], ["--shuffles=lines"]]
)
def test_options_that_cannot_be(path: Path, words: list[str]) -> None:
    assert main(["bench", "loader", str(path), "--global-batch=50", *words]) != 0


def test_a_side_that_reads_something_else_is_refused(path: Path) -> None:
    class Wrong:
        indices = np.array([3])
        size = 1

        def __getitem__(self, name: str) -> "np.ndarray":
            import torch

            return torch.zeros(1, 6, dtype=torch.int32) if name == "x" else torch.tensor([3])

    run = _passes(lambda: iter([Wrong()]), 1, describe(path, ("x", "y")), str(path))
    with pytest.raises(MpidpError, match='row 3 of "x" differs'):
        run()
