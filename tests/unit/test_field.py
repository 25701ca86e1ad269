"""`FieldSpec` on real files: members, axes, dtypes, decode functions, and what is refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from mpidp.errors import DataError
from mpidp.hdf5.field import FieldSpec
from mpidp.hdf5.files.describe import describe
from mpidp.hdf5.loader import HDF5Loader

ROWS = 30
POINT = np.dtype([("id", ">i4"), ("place", "<f8", (2,)), ("name", "S4"), ("ok", "?")], align=True)


def points() -> np.ndarray:
    values = np.zeros(ROWS, POINT)
    values["id"], values["ok"] = np.arange(ROWS), np.arange(ROWS) % 3 == 0
    values["place"] = np.arange(2 * ROWS).reshape(ROWS, 2) / 4
    values["name"] = [f"n{row}".encode() for row in range(ROWS)]
    return values


@pytest.fixture(params=["chunked", "contiguous", "compact"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """One dataset of points, one of images whose samples lie along the last axis, one of words."""
    options: dict[str, Any] = (
        {"chunks": (8,), "compression": "gzip", "shuffle": True} if request.param == "chunked" else {}
    )
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, values in (("points", points()), ("words", points()["name"])):
            if request.param == "compact":
                plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                plist.set_layout(h5py.h5d.COMPACT)
                kind, space = h5py.h5t.py_create(values.dtype, logical=True), h5py.h5s.create_simple(values.shape)
                h5py.Dataset(h5py.h5d.create(file.id, name.encode(), kind, space, plist))[...] = values
            else:
                file.create_dataset(name, data=values, **options)
        images = np.arange(3 * ROWS * 4, dtype=">u2").reshape(3, ROWS, 4)
        file.create_dataset("middle", data=images, chunks=(2, 7, 4) if options else None)
        file.create_dataset("last", data=np.moveaxis(images, 1, 2), chunks=(3, 3, 7) if options else None)
    return tmp_path / "a.h5"


@pytest.fixture
def path_of_one(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["points"], file["words"] = np.arange(6.0).reshape(3, 2), points(), points()["name"]
    return tmp_path / "a.h5"


def read(path: Path, *fields: FieldSpec | str) -> dict[str, torch.Tensor]:
    """All rows of a file, in their order."""
    with h5py.File(path) as file:
        rows = max(max(item.shape) for item in file.values())
    loader = HDF5Loader(path, fields, rows, shuffle="none")
    batch = next(iter(loader))
    found = {name: batch[name].clone() for name in batch.fields}
    loader.close()
    return found


def length_and_first(words: np.ndarray) -> np.ndarray:
    return np.array([[len(word), word[0]] for word in words.tolist()], "i2")


def test_members(path: Path) -> None:
    """Behaviour 27: numbers and arrays of a compound, each a field; named by dataset and member unless renamed."""
    found = read(
        path,
        FieldSpec("points", member="id"),
        FieldSpec("points", member="place", name="xy", dtype="float32"),
        FieldSpec("points", member="ok"),
        FieldSpec("points", member="id", name="scaled", scale=0.5, offset=1.0),
    )
    np.testing.assert_array_equal(found["points.id"], points()["id"])
    np.testing.assert_array_equal(found["xy"], points()["place"])
    np.testing.assert_array_equal(found["points.ok"], points()["ok"])
    np.testing.assert_array_equal(found["scaled"], points()["id"] * 0.5 + 1)
    assert [found[name].dtype for name in found] == [torch.int32, torch.float32, torch.bool, torch.float32]


def test_decode(path: Path) -> None:
    """Behaviour 27: fixed-length strings, a member of such, and whole compounds, by a function of the user's."""
    found = read(
        path,
        FieldSpec("words", decode=length_and_first),
        FieldSpec("points", member="name", name="lengths", decode=lambda names: np.array([len(n) for n in names])),
        FieldSpec("points", name="sums", decode=lambda rows: rows["place"].sum(axis=1) + rows["id"], dtype="float32"),
    )
    np.testing.assert_array_equal(found["words"], length_and_first(points()["name"]))
    np.testing.assert_array_equal(found["lengths"], [len(name) for name in points()["name"].tolist()])
    np.testing.assert_array_equal(found["sums"], points()["place"].sum(axis=1) + points()["id"])
    assert found["words"].dtype == torch.int16 and found["sums"].dtype == torch.float32


@pytest.mark.filterwarnings("ignore:.*is read by HDF5, one thread at a time")
@pytest.mark.parametrize("axis", [1, -1, 2, -2])
def test_axes(path: Path, axis: int) -> None:
    """Behaviour 27: samples along any axis; that axis is taken out of the shape of a sample."""
    name = "middle" if axis in (1, -2) else "last"
    found = read(path, FieldSpec(name, axis=axis))[name]
    with h5py.File(path) as file:
        expected = np.moveaxis(file[name][:], axis, 0)
    assert found.dtype == torch.int32
    np.testing.assert_array_equal(found, expected.astype("i4"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "complex64"])
def test_dtypes_of_tensors(path_of_one: Path, dtype: str) -> None:
    found = read(path_of_one, FieldSpec("points", member="id", dtype=dtype))["points.id"]
    assert found.dtype == getattr(torch, dtype)
    np.testing.assert_array_equal(found.to(torch.complex128).real, np.arange(ROWS))


def bfloat16_file(path: Path, values: np.ndarray, order: int) -> Path:
    kind = h5py.h5t.IEEE_F16LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_ebias(127)
    kind.set_order(order)
    with h5py.File(path, "w") as file:
        space = h5py.h5s.create_simple(values.shape)
        h5py.Dataset(h5py.h5d.create(file.id, b"x", kind, space))[...] = values
    return path


@pytest.mark.parametrize("order", [h5py.h5t.ORDER_LE, h5py.h5t.ORDER_BE])
def test_stored_bfloat16(tmp_path: Path, order: int) -> None:
    """Behaviour 27: bfloat16 stays bfloat16, in either byte order; another dtype is made of its values."""
    values = np.array([1.5, -3, np.inf, 2.0**-133], "f4")
    path = bfloat16_file(tmp_path / "a.h5", values, order)
    assert describe(path, ("x",)).files[0].slow == ("",)
    found = read(path, "x", FieldSpec("x", name="wide", dtype="float32"), FieldSpec("x", name="twice", scale=2.0))
    assert [found[name].dtype for name in found] == [torch.bfloat16, torch.float32, torch.float32]
    for name, factor in (("x", 1), ("wide", 1), ("twice", 2)):
        np.testing.assert_array_equal(found[name].float(), values * np.float32(factor))


def broken(words: np.ndarray) -> np.ndarray:
    raise ZeroDivisionError("on purpose")


REFUSED: dict[str, tuple[FieldSpec, str]] = {
    "compound": (FieldSpec("points"), r'"points" has type compound .*name one of its members \(id, place, name, ok\)'),
    "text member": (
        FieldSpec("points", member="name"),
        r"has a member \"name\" of type .*which no tensor can hold; give a FieldSpec with decode",
    ),
    "no such member": (FieldSpec("points", member="z"), 'has members id, place, name, ok; "z" is not there'),
    "no members": (FieldSpec("x", member="a"), 'float64, which has no members; "a" is not there'),
    "words": (FieldSpec("words"), r'"words" has type string \|S4, .*give a FieldSpec with decode'),
    "axis": (FieldSpec("x", axis=2), r'"x" has shape \(3, 2\), so there is no axis 2'),
    "axis from the end": (FieldSpec("x", axis=-3), "there is no axis -3"),
    "fractions": (
        FieldSpec("x", dtype="int32"),
        "holds float64, and dtype int32 was asked for: fractions would be lost",
    ),
    "decode fails": (FieldSpec("x", decode=broken), "decode failed on the first sample: ZeroDivisionError.*on purpose"),
    "decode gives text": (FieldSpec("x", decode=lambda a: np.array(["a"])), "decode returned <U1 of shape"),
    "decode gives one number": (FieldSpec("x", decode=lambda a: np.array(1.0)), r"of shape \(\) for one sample"),
    "decode drops": (FieldSpec("x", decode=lambda a: a[:0]), r"of shape \(0, 2\) for one sample"),
    "decode gives nothing": (FieldSpec("x", decode=lambda a: a[:, :0]), r"of shape \(1, 0\) for one sample"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(path_of_one: Path, case: str) -> None:
    """Behaviour 27: at construction, with file and dataset."""
    spec, text = REFUSED[case]
    with pytest.raises(DataError, match=f"(?s)a.h5: dataset .*{text}"):
        describe(path_of_one, (spec,))


def test_decode_that_changes_its_mind(path_of_one: Path) -> None:
    """Found while reading: rows are named."""
    spec = FieldSpec("words", decode=lambda words: np.zeros((len(words), max(len(word) for word in words.tolist()))))
    with pytest.raises(DataError, match=r'"words", rows 0 to 29: decode returned float64 of shape \(30, 3\)'):
        read(path_of_one, spec)


def test_settings_name_the_function() -> None:
    """Ranks compare what they were given; functions by name."""
    one: Callable[[np.ndarray], np.ndarray] = length_and_first
    assert FieldSpec("x", decode=one).settings() != FieldSpec("x", decode=broken).settings()
    assert FieldSpec("x", decode=one).settings() == FieldSpec("x", decode=length_and_first).settings()
