"""`mpidp data convert` from CSV: what it reads, and what it says about cells that it cannot."""

from pathlib import Path

import numpy as np
import pytest
from data_files import assert_same, error_of, leftovers, read, run

TABLE = """sepal length,"petal, length",species
5.1,1.4,setosa
7.0,4.7,"versi, color"
6.3,-6e0,setosa
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "in.csv").write_text(TABLE)
    return tmp_path / "in.csv"


def test_words_become_numbers_and_names_are_kept(table: Path, tmp_path: Path) -> None:
    assert run("convert", table, tmp_path / "out.h5", "--label=species") == 0
    found = read(tmp_path / "out.h5")
    assert_same(found["x"], np.array([[5.1, 1.4], [7.0, 4.7], [6.3, -6]], np.float32))
    assert_same(found["y"], np.array([0, 1, 0]))
    assert found["x_columns"].tolist() == [b"sepal length", b"petal, length"]
    assert found["y_classes"].tolist() == [b"setosa", b"versi, color"]
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("rows", [0, 1, 1000])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_numbers_as_labels_blank_lines_and_no_last_newline(tmp_path: Path, rows: int, ending: str) -> None:
    x = np.random.default_rng(0).normal(size=(rows, 3))
    lines = ["\ufeffa;b;c;y", "", *(f"{a!r};{b!r};{c!r};{-n}" for n, (a, b, c) in enumerate(x.tolist()))]
    (tmp_path / "in.csv").write_text(ending.join(lines), newline="")
    words = ["--label=y", "--columns=c,a", "--dtype=float64", "--delimiter=;", "--chunk-rows=7"]
    assert run("convert", tmp_path / "in.csv", tmp_path / "out.h5", *words) == 0
    assert run("convert", tmp_path / "in.csv", tmp_path / "mixed.h5", *words, "--shuffle-rows=3") == 0
    found, mixed = read(tmp_path / "out.h5"), read(tmp_path / "mixed.h5")
    assert_same(found["x"], x[:, [2, 0]])
    assert_same(found["y"], -np.arange(rows))
    assert_same(mixed["x"], x[-mixed["y"]][:, [2, 0]])
    assert sorted(mixed["y"].tolist()) == sorted(found["y"].tolist())


def test_labels_that_are_fractions(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("a,t\n1,0.5\n2,7\n")
    assert run("convert", tmp_path / "in.csv", tmp_path / "out.h5", "--label=t") == 0
    assert_same(read(tmp_path / "out.h5")["y"], np.array([0.5, 7], np.float32))


def test_tabs_and_no_header(tmp_path: Path) -> None:
    (tmp_path / "in.tsv").write_text("1\t2\n3\t4\n")
    assert run("convert", tmp_path / "in.tsv", tmp_path / "out.h5", "--no-header", "--label=1") == 0
    found = read(tmp_path / "out.h5")
    assert found["x"].tolist() == [[1], [3]] and found["y"].tolist() == [2, 4]


def test_empty_cells_become_nan_only_where_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.csv").write_text("a,b\n1,2\n3,\n")
    error = error_of(capsys, "convert", tmp_path / "in.csv", tmp_path / "out.h5", code=1)
    assert 'line 3, column "b": the cell is empty' in error and "--empty-as-nan" in error
    assert run("convert", tmp_path / "in.csv", tmp_path / "nan.h5", "--empty-as-nan") == 0
    assert_same(read(tmp_path / "nan.h5")["x"], np.array([[1, 2], [3, np.nan]], np.float32))


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("", [], "is empty"),
        ("1,2\n3,4\n", [], "give --no-header"),
        ("a,a\n1,2\n", [], 'two columns are called "a"'),
        ("a,b\n1,2\n\n1,x\n", [], 'line 4, column "b": "x" is not a number'),
        ("a,b\n1,2\n3\n", [], "line 3: has 1 cells, the first line has 2"),
        ("a,b\n1,2\n3\n", ["--label=b"], "line 3: has 1 cells"),
        ('a,b\n1,"2\n', [], "line 2: cannot be read as CSV"),
        ("a,b\n1,2\n\udcff,2\n", [], "line 3: cannot be read as CSV"),
        ("a\n9007199254740993\n", ["--dtype=float64"], '"a": 9007199254740993 does not fit float64 exactly; leave'),
        ("a,b\n1,2\n", ["--label=c"], 'no column "c"; its columns are a, b'),
        ("a,b\n1,2\n", ["--label=a", "--columns=c"], 'no column "c"'),
        ("a\n1\n", ["--label=a"], "no columns are left"),
        ("a,b\n1,16777217\n", [], 'line 2, column "b": 16777217 does not fit float32 exactly; give --dtype=float64'),
        ("a,b\n1,2\n", ["--delimiter=;;"], "expected one character"),
    ],
)
def test_tables_that_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: list[str], message: str
) -> None:
    """The line and the column are those that an editor shows."""
    (tmp_path / "in.csv").write_text(text, errors="surrogateescape")
    assert run("convert", tmp_path / "in.csv", tmp_path / "out.h5", *words) in (1, 2)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.h5").exists()


def test_whole_numbers_are_kept(tmp_path: Path) -> None:
    """In float64 up to 2^53, in labels to the last of int64."""
    (tmp_path / "in.csv").write_text(f'a,y,"two\nlines"\n16777217,{2**63 - 1},"x\ny"\n-9007199254740992,3,-\n')
    words = ["--dtype=float64", "--label=y", "--columns=a"]
    assert run("convert", tmp_path / "in.csv", tmp_path / "out.h5", *words) == 0
    found = read(tmp_path / "out.h5")
    assert (found["x"].tolist(), found["y"].tolist()) == ([[16777217], [-(2**53)]], [2**63 - 1, 3])


def test_a_table_of_many_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpidp.tools.data.csv._BLOCK_CELLS", 7)
    lines = ["a,b,y", *(f"{n},{-n},{'even' if n % 2 == 0 else 'odd'}" for n in range(99))]
    (tmp_path / "in.csv").write_text("\n".join(lines))
    assert run("convert", tmp_path / "in.csv", tmp_path / "out.h5", "--label=y") == 0
    found, rows = read(tmp_path / "out.h5"), np.arange(99)
    assert_same(found["x"], np.stack([rows, -rows], 1).astype(np.float32))
    assert_same(found["y"], rows % 2)
