"""`mpidp data convert` of HDF5: what is not written anew arrives as it was, or is named as left out."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from data_files import assert_same, error_of, run

ROWS = 40


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def converted(source: str, *words: str) -> Any:
    assert run("convert", source, "out.h5", "--overwrite", "--chunk-rows=7", *words) == 0
    return h5py.File("out.h5")


def same_object(file: Any, one: str, other: str) -> bool:
    return bool(h5py.h5o.get_info(file[one].id).addr == h5py.h5o.get_info(file[other].id).addr)


def test_links_types_fill_values_and_empty_groups(folder: Path) -> None:
    with h5py.File("in.h5", "w") as file:
        file.create_dataset("b/values", data=np.arange(ROWS, dtype=">i2"), chunks=(9,), maxshape=(None,), fillvalue=-7)
        file["a"] = file["b/values"]
        file["soft"], file["nowhere"] = h5py.SoftLink("/b/values"), h5py.SoftLink("/gone")
        file["other"] = h5py.ExternalLink("other.h5", "/x")
        file["cycle"] = file["b"]
        file["kind"] = np.dtype([("when", "<f8"), ("where", "<f4", 2)])
        file["kind"].attrs["unit"] = "s"
        file.create_dataset("table", data=np.zeros(ROWS, file["kind"].dtype), dtype=file["kind"])
        file.create_group("setup").attrs["camera"] = "A"
        file.create_group("ordered", track_order=True).update({name: 1.0 for name in "zyx"})
    with converted("in.h5") as file:
        assert same_object(file, "a", "b/values") and same_object(file, "b", "cycle")
        assert file.get("soft", getlink=True).path == "/b/values" and file["soft"] == file["a"]
        assert file.get("nowhere", getlink=True).path == "/gone"
        assert file.get("other", getlink=True).filename == "other.h5"
        assert file["a"].fillvalue == -7 and file["a"].maxshape == (None,) and file["a"].chunks == (7,)
        assert file["a"].dtype == ">i2" and file["a"][:].tolist() == list(range(ROWS))
        assert h5py.h5o.get_info(file["table"].id.get_type()).addr == h5py.h5o.get_info(file["kind"].id).addr
        assert file["kind"].attrs["unit"] == "s" and file["setup"].attrs["camera"] == "A"
        assert list(file["ordered"]) == ["z", "y", "x"]


def test_rows_added_later_lie_beside_fill_values(folder: Path) -> None:
    """The last chunk is filled up as HDF5 would."""
    with h5py.File("in.h5", "w") as file:
        file.create_dataset("x", data=np.ones((ROWS, 2), "<f4"), chunks=(9, 2), maxshape=(None, 2), fillvalue=np.nan)
    converted("in.h5").close()
    with h5py.File("out.h5", "r+") as file:
        file["x"].resize((ROWS + 1, 2))
        assert np.isnan(file["x"][ROWS]).all() and (file["x"][:ROWS] == 1).all()


def test_attributes_of_any_size_and_type(folder: Path) -> None:
    with h5py.File("in.h5", "w", libver="latest") as file:
        file["x"] = np.arange(ROWS)
        attributes = {
            "large": np.arange(20_000.0),
            "text": "ä",
            "texts": np.array(["one", "three"], object),
            "bytes": np.bytes_("b"),
            "nothing": h5py.Empty("f4"),
            "table": np.array([(1, b"a")], [("n", ">i4"), ("s", "S3")]),
            "none": np.zeros((0, 3)),
        }
        file["x"].attrs.update(attributes)
        file["x"].attrs.create("ragged", [np.arange(2), np.arange(3)], dtype=h5py.vlen_dtype("i4"))
        file["x"].attrs.create("choice", 1, dtype=h5py.enum_dtype({"NO": 0, "YES": 1}))
        empty = h5py.h5s.create(h5py.h5s.SCALAR)
        h5py.h5a.create(file["x"].id, b"when", h5py.h5t.UNIX_D64LE, empty)
        kinds = {name: file["x"].attrs.get_id(name).get_type() for name in file["x"].attrs if name != "when"}
        with converted("in.h5") as new:
            assert set(new["x"].attrs) == {*attributes, "ragged", "choice", "when"}
            for name, kind in kinds.items():
                assert new["x"].attrs.get_id(name).get_type().equal(kind), name
            assert_same(new["x"].attrs["large"], attributes["large"])
            assert new["x"].attrs["text"] == "ä" and new["x"].attrs["texts"].tolist() == ["one", "three"]
            assert [part.tolist() for part in new["x"].attrs["ragged"]] == [[0, 1], [0, 1, 2]]
            assert new["x"].attrs["table"].tolist() == [(1, b"a")] and new["x"].attrs["none"].shape == (0, 3)


def test_references_lead_to_the_same_objects(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scales of dimensions stay attached; a reference to what is not taken is named and left out."""
    with h5py.File("in.h5", "w") as file:
        file["time"], file["x"], file["g/y"] = np.arange(ROWS), np.zeros((ROWS, 2)), np.zeros(3)
        file["time"].make_scale("time")
        file["x"].dims[0].attach_scale(file["time"])
        file["pointers"] = np.array([file["x"].ref, file["g"].ref], h5py.ref_dtype)
        file["x"].attrs["region"] = file["x"].regionref[:2]
    with converted("in.h5") as file:
        assert file["x"].dims[0][0] == file["time"]
        assert [file[reference].name for reference in file["pointers"][:]] == ["/x", "/g"]
        assert "region" not in file["x"].attrs
    assert "/x: left out attributes, each of which refers to regions of datasets: region" in capsys.readouterr().err
    with converted("in.h5", "--fields=x") as file:
        assert list(file) == ["x"] and "DIMENSION_LIST" not in file["x"].attrs
    assert "refers to what is not copied: DIMENSION_LIST" in capsys.readouterr().err


def test_types_that_numpy_does_not_know(folder: Path) -> None:
    """Values are moved as the bytes they are: no type is turned into another."""
    kinds = {
        "when": h5py.h5t.UNIX_D64LE,
        "vax": h5py.h5t.IEEE_F64LE.copy(),
        "half": h5py.h5t.IEEE_F32LE.copy(),
        "bits": h5py.h5t.STD_B16LE,
    }
    kinds["half"].set_fields(15, 7, 8, 0, 7)
    kinds["half"].set_size(2)
    kinds["half"].set_ebias(127)
    stored = {}
    with h5py.File("in.h5", "w") as file:
        for name, kind in kinds.items():
            made = h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create_simple((ROWS,)))
            stored[name] = np.random.default_rng(0).integers(0, 100, ROWS * kind.get_size(), "u1")
            made.write(h5py.h5s.ALL, h5py.h5s.ALL, stored[name], mtype=kind)
    for compression in ("gzip:1", "lzf", "none"):
        with converted("in.h5", f"--compression={compression}") as file:
            for name, kind in kinds.items():
                assert file[name].id.get_type().equal(kind) and file[name].chunks == (7,)
                found = np.empty(ROWS * kind.get_size(), "u1")
                file[name].id.read(h5py.h5s.ALL, h5py.h5s.ALL, found, mtype=kind)
                assert_same(found, stored[name])


@pytest.fixture
def elsewhere(folder: Path) -> Iterator[Path]:
    """A file whose values lie in others, in three ways."""
    values = np.arange(ROWS, dtype="i8")
    Path("raw.bin").write_bytes(values.tobytes())
    with h5py.File("there.h5", "w") as there:
        there["x"], there["group/y"] = values, values + 1
    layout = h5py.VirtualLayout((ROWS,), "i8")
    layout[:] = h5py.VirtualSource("there.h5", "x", (ROWS,))
    with h5py.File("in.h5", "w") as file:
        file["link"], file["group"] = h5py.ExternalLink("there.h5", "x"), h5py.ExternalLink("there.h5", "group")
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("raw", (ROWS,), "i8", external=[("raw.bin", 0, 8 * ROWS)])
        file["own"] = values + 2
    yield folder


def test_what_lies_in_other_files_is_copied_only_when_asked(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Behaviour 56."""
    assert "stored in other files: raw.bin; --expand-external" in error_of(capsys, "convert", "in.h5", "no.h5", code=1)
    for name, text in {"virtual": "there.h5", "raw": "raw.bin", "link": "external link", "group/y": "link"}.items():
        assert text in error_of(capsys, "convert", "in.h5", "no.h5", f"--fields={name}", code=1)
    assert not Path("no.h5").exists()
    with h5py.File("in.h5", "r+") as file:
        del file["raw"], file["virtual"]
    with converted("in.h5") as file:
        assert file.get("link", getlink=True).filename == "there.h5"
    assert "kept as links into other files, " in (said := capsys.readouterr().err) and "group, link" in said


def test_and_then_it_is_copied(elsewhere: Path) -> None:
    with converted("in.h5", "--expand-external") as file:
        for name, more in {"link": 0, "virtual": 0, "raw": 0, "own": 2, "group/y": 1}.items():
            assert_same(file[name][:], np.arange(ROWS, dtype="i8") + more)
            assert file[name].file == file and file[name].chunks and not file[name].external


def test_some_fields_only(folder: Path) -> None:
    """Two names of one dataset stay one; a link that is named becomes what it leads to; groups keep attributes."""
    with h5py.File("in.h5", "w") as file:
        file["g/x"], file["z"] = np.arange(ROWS), np.zeros(3)
        file["g/same"], file["soft"] = file["g/x"], h5py.SoftLink("z")
        file["g"].attrs["unit"] = "m"
    with converted("in.h5", "--fields=g/same,g/x,soft") as file:
        assert sorted(file) == ["g", "soft"] and same_object(file, "g/x", "g/same")
        assert file["soft"][:].tolist() == [0, 0, 0] and file["g"].attrs["unit"] == "m"


def test_what_other_programs_keep_for_themselves_is_copied_as_it_is(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dimension of netCDF that was never written; the parts of a sparse matrix, which have no rows."""
    with h5py.File("in.h5", "w") as file:
        file["x"] = np.zeros((ROWS, 2))
        bounds = file.create_dataset("bnds", (2,), ">f4")
        bounds.make_scale("This is a netCDF dimension but not a netCDF variable.         2")
        file["x"].dims[1].attach_scale(bounds)
        for part in ("data", "indices", "indptr"):
            file[f"counts/{part}"] = np.arange(ROWS)
        file["counts"].attrs.update({"encoding-type": "csr_matrix", "shape": (ROWS, 9)})
    with converted("in.h5") as file:
        assert file["x"].dims[1][0] == file["bnds"] and not file["bnds"].id.get_storage_size()
        assert file["counts/data"].chunks is None and file["counts"].attrs["encoding-type"] == "csr_matrix"
    said = capsys.readouterr().err
    assert "copied as they are: bnds, counts/data, counts/indices, counts/indptr" in said
    assert "counts is a sparse matrix of 40 x 9 (csr_matrix), and stays one" in said


def test_foreign_suffixes_are_known_by_what_is_in_the_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with h5py.File("cells.h5ad", "w", userblock_size=512) as file:
        file["x"] = np.arange(ROWS)
    assert run("convert", "cells.h5ad", "new.nxs") == 0
    with h5py.File("new.nxs") as file:
        assert file["x"][:].tolist() == list(range(ROWS))
    Path("cells.h5ad").write_text("no HDF5")
    assert "unknown kind of source" in error_of(capsys, "convert", "cells.h5ad", "out.h5", code=2)


def samples(path: str, count: int = 12, inner: str = "") -> None:
    with h5py.File(path, "w") as file:
        file["meta"] = "kept"
        for number in range(count):
            sample = file.create_group(f"{inner}sample_{number}")
            sample["x"], sample["more/y"] = np.full((3, 2), number, "<f4"), number % 5
            sample.attrs["label"], sample["text"] = number, "varies"


def test_a_group_for_each_sample_becomes_a_dataset_for_each_field(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In natural order of the names, which are kept; what cannot be stacked is named."""
    for inner, stack in (("", "/"), ("all/of/", "/all/of")):
        samples("in.h5", inner=inner)
        with converted("in.h5", f"--stack-groups={stack}", "--workers=2") as file:
            base = file[stack]
            assert base["x"].shape == (12, 3, 2) and base["x"][:, 0, 0].tolist() == list(range(12))
            assert base["more/y"][:].tolist() == [number % 5 for number in range(12)]
            assert base["group_names"].asstr()[9:].tolist() == ["sample_9", "sample_10", "sample_11"]
            assert file["meta"].asstr()[()] == "kept" and not any("sample" in name for name in base)
        said = capsys.readouterr().err
        assert "left out of each group, since its size varies: text" in said
        assert "left out attributes of the 12 groups: label" in said


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda file: file["sample_7"].pop("x"), '"sample_0" has a dataset "x", "sample_7" has none'),
        (
            lambda file: (file["sample_7"].pop("x"), file["sample_7"].update({"x": np.zeros((4, 2), "f4")})),
            r'"sample_0/x" is float32 of shape \(3, 2\), "sample_7/x" is float32 of shape \(4, 2\)',
        ),
        (
            lambda file: (file["sample_7"].pop("x"), file["sample_7"].update({"x": np.zeros((3, 2))})),
            '"sample_7/x" is float64',
        ),
    ],
)
def test_groups_that_differ_are_refused_by_name(
    folder: Path, capsys: pytest.CaptureFixture[str], change: Any, text: str
) -> None:
    samples("in.h5")
    with h5py.File("in.h5", "r+") as file:
        change(file)
    error = error_of(capsys, "convert", "in.h5", "out.h5", "--stack-groups=/", code=1)
    assert pytest.RaisesExc(ValueError, match=text).matches(ValueError(error)), error
    assert "no group that holds groups" in error_of(capsys, "convert", "in.h5", "out.h5", "--stack-groups=m", code=1)
