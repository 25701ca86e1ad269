"""`mpidp data make`: values follow from the seed alone, and can be learnt."""

from pathlib import Path

import h5py
import numpy as np
import pytest
from data_files import assert_same, error_of, leftovers, read, run
from hypothesis import given
from hypothesis import strategies as st

from mpidp.tools.data.source import SyntheticSource

LABELS = [7, 5, 3, 5]
VALUES = [[-0.06676984, -0.21670157], [-1.4042681, 0.17056254], [0.19273648, -1.159985], [-0.7571806, 0.93483627]]
FIELDS = ["--field=x:float32:3,5", "--field=y:int64", "--field=image:uint8:4,4", "--field=mask:bool:2"]


def test_as_asked(tmp_path: Path) -> None:
    path = tmp_path / "out.h5"
    words = [*FIELDS, "--rows=500", "--classes=7", "--chunk-rows=64", "--compression=gzip:4"]
    assert run("make", path, *words) == 0
    with h5py.File(path) as file:
        shapes = {name: (data.shape, data.dtype.str, data.chunks) for name, data in file.items()}
        assert file["x"].compression == "gzip" and file["x"].compression_opts == 4
    assert shapes == {
        "x": ((500, 3, 5), "<f4", (64, 3, 5)),
        "y": ((500,), "<i8", (64,)),
        "image": ((500, 4, 4), "|u1", (64, 4, 4)),
        "mask": ((500, 2), "|b1", (64, 2)),
    }
    assert set(read(path)["y"]) == set(range(7))
    assert leftovers(tmp_path) == []


def test_values_follow_from_the_seed_whatever_the_chunks_and_workers(tmp_path: Path) -> None:
    words = {
        "a": ["--chunk-rows=64", "--workers=1"],
        "b": ["--chunk-rows=1000", "--compression=none", "--workers=2"],
        "c": ["--chunk-rows=64", "--seed=1"],
    }
    for name, options in words.items():
        assert run("make", tmp_path / f"{name}.h5", "--rows=3001", *FIELDS, *options) == 0
    a, b, c = (read(tmp_path / f"{name}.h5") for name in "abc")
    for name in a:
        assert_same(a[name], b[name])
        assert not np.array_equal(a[name], c[name])


@given(rows=st.lists(st.integers(0, 9999), min_size=1, max_size=30), size=st.sampled_from([1, 7, 20_000]))
def test_a_row_does_not_depend_on_those_beside_it(rows: list[int], size: int) -> None:
    source = SyntheticSource([f"x:float32:{size}", "y:int64"], 10_000, 3, 0)
    together = source.take(["x", "y"], np.array(rows))
    for place in (0, -1):
        alone = source.take(["x", "y"], np.array([rows[place]]))
        assert_same(alone["x"][0], together["x"][place])
        assert alone["y"][0] == together["y"][place]


def test_noise_has_unit_variance_around_the_mean_of_the_class() -> None:
    source = SyntheticSource(["x:float64:8", "y:int8"], 20_000, 4, 3)
    values = source.take(["x", "y"], np.arange(20_000))
    assert np.bincount(values["y"]).min() > 4500
    for label in range(4):
        ours = values["x"][values["y"] == label]
        np.testing.assert_allclose(np.abs(ours.mean(axis=0)), 0.5, atol=0.06)
        np.testing.assert_allclose(ours.std(axis=0), 1, atol=0.05)


def test_it_can_be_learnt(tmp_path: Path) -> None:
    """The nearest class mean of the first half names most classes of the second."""
    assert run("make", tmp_path / "out.h5", "--rows=2000", "--field=x:uint8:8,8", "--field=y:int64") == 0
    data = read(tmp_path / "out.h5")
    x, y = data["x"].reshape(2000, -1).astype(float), data["y"]
    means = np.stack([x[:1000][y[:1000] == label].mean(axis=0) for label in range(10)])
    nearest = ((x[1000:, None] - means) ** 2).sum(axis=2).argmin(axis=1)
    assert (nearest == y[1000:]).mean() > 0.95


def test_the_first_values_of_seed_0_never_change(tmp_path: Path) -> None:
    """Data that was made once can be made again by a later version."""
    values = SyntheticSource(["x:float32:2", "y:int64"], 4, 10, 0).take(["x", "y"], np.arange(4))
    assert values["y"].tolist() == LABELS
    np.testing.assert_array_equal(values["x"], np.array(VALUES, np.float32))


@pytest.mark.parametrize("rows", [0, 1])
def test_edge_sizes(tmp_path: Path, rows: int) -> None:
    assert run("make", tmp_path / "out.h5", f"--rows={rows}", *FIELDS) == 0
    assert {name: len(values) for name, values in read(tmp_path / "out.h5").items()} == dict.fromkeys(
        ("x", "y", "image", "mask"), rows
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no --field was given"),
        (["--field=x"], "expected NAME:TYPE"),
        (["--field=x:float33"], "expected NAME:TYPE"),
        (["--field=x:str"], "expected NAME:TYPE"),
        (["--field=x:float32:3,0"], "expected NAME:TYPE"),
        (["--field=x:int8", "--field=x:int8"], "two fields have one name"),
        (["--field=x:int8", "--classes=1000"], "do not fit --field=x:int8"),
        (["--field=x:int8", "--classes=0"], "--classes=0"),
        (["--field=x:int8", "--rows=-1"], "--rows=-1"),
        (["--field=x:int8", "--seed=-1"], "seed is -1"),
    ],
)
def test_wrong_words(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert run("make", tmp_path / "out.h5", *words) in (1, 2)
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_target_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "takes the TARGET" in error_of(capsys, "make", "--field=x:int8", code=2)
