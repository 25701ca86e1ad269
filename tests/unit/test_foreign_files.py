"""Files of other programs: what HDF5, PyTables, netCDF and AnnData write, and how the loader reads or refuses it."""

import os
import re
import struct
import warnings
from contextlib import closing
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

ROWS = 24
SLOW = pytest.mark.filterwarnings("ignore:.*is read by HDF5, one thread at a time")


def load(path: Path | list[Path], *fields: FieldSpec | str, **options: Any) -> dict[str, torch.Tensor]:
    """All rows, in file order."""
    rows = describe(path, fields, **options).num_rows
    with closing(HDF5Loader(path, fields, rows, shuffle="none", **options)) as loader:
        batch = next(iter(loader))
        return {name: batch[name].clone() for name in batch.fields}


def write_table(path: Path, **others: Any) -> np.ndarray:
    """A compound "t" of HDF5 types: members "first" and "last", float32, and `others` between them; return "last"."""
    size = 8 + sum(kind.get_size() for kind in others.values())
    kind, place = h5py.h5t.create(h5py.h5t.COMPOUND, size), 0
    for name, member in {"first": h5py.h5t.IEEE_F32LE, **others, "last": h5py.h5t.IEEE_F32BE}.items():
        kind.insert(name.encode(), place, member)
        place += member.get_size()
    values = np.zeros(ROWS, [("first", "f4"), ("last", "f4")])
    values["first"], values["last"] = np.arange(ROWS), np.arange(ROWS) / 2
    with h5py.File(path, "w") as file:
        table = h5py.h5d.create(file.id, b"t", kind, h5py.h5s.create_simple((ROWS,)))
        table.write(h5py.h5s.ALL, h5py.h5s.ALL, values)
    return values["last"]


ODD: dict[str, Any] = {
    "text": h5py.h5t.py_create(h5py.string_dtype(), logical=True),
    "varying": h5py.h5t.py_create(h5py.vlen_dtype("i4"), logical=True),
    "time": h5py.h5t.UNIX_D64LE,
    "opaque": h5py.h5t.py_create(np.dtype("V6"), logical=True),
}


@SLOW
@pytest.mark.parametrize("odd", [*ODD, "all"])
def test_members_beside_odd_ones(tmp_path: Path, odd: str) -> None:
    """Behaviour 27: HDF5 reads a member alone, so that what lies beside it does no harm."""
    last = write_table(tmp_path / "a.h5", **(ODD if odd == "all" else {odd: ODD[odd]}))
    np.testing.assert_array_equal(load(tmp_path / "a.h5", FieldSpec("t", member="last"))["t.last"], last)
    name = "time" if odd == "all" else odd
    with pytest.raises(DataError, match=rf'has a member "{name}" of type .*which no tensor can hold; give a FieldSpec'):
        describe(tmp_path / "a.h5", [FieldSpec("t", member=name)])
    with pytest.raises(DataError, match=r"name one of its members \(first, .*last"):
        describe(tmp_path / "a.h5", ["t"])


def test_members_are_not_listed_by_the_hundred(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["t"] = np.zeros(5, [(f"m{number}", "f4") for number in range(100)])
    with pytest.raises(DataError) as error:
        describe(tmp_path / "a.h5", ["t"])
    assert "m9" in str(error.value) and "m10" not in str(error.value) and "and 90 more" in str(error.value)


@SLOW
@pytest.mark.parametrize("options", [{}, {"chunks": (5,), "compression": "gzip"}])
def test_array_types(tmp_path: Path, options: dict[str, Any]) -> None:
    """Behaviour 27: elements that are arrays; their axes come behind those of the dataset."""
    matrices = np.arange(ROWS * 6, dtype=">i2").reshape(ROWS, 2, 3)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (ROWS,), np.dtype((">i2", (2, 3))), **options)[...] = matrices
    found = load(tmp_path / "a.h5", "x", FieldSpec("x", name="half", scale=0.5))
    np.testing.assert_array_equal(found["x"], matrices)
    np.testing.assert_array_equal(found["half"], matrices / 2)


@SLOW
def test_decode_is_given_what_no_tensor_holds(tmp_path: Path) -> None:
    """Behaviour 27: text and arrays of varying length, opaque values, also as members of compounds."""
    sizes = np.arange(ROWS) % 5 + 1
    text = h5py.string_dtype()
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["text"] = ["é" * size for size in sizes]
        file["opaque"] = np.array([np.void(b"\1" * size + bytes(6 - size)) for size in sizes])
        file.create_dataset("varying", (ROWS,), h5py.vlen_dtype("u1"))[:] = [np.ones(size, "u1") for size in sizes]
        table = np.zeros(ROWS, [("name", text), ("id", "i4")])
        table["name"] = ["b" * size for size in sizes]
        file["table"] = table
    found = load(
        tmp_path / "a.h5",
        FieldSpec("text", decode=lambda values: np.array([len(value.decode()) for value in values])),
        FieldSpec("opaque", decode=lambda values: np.array([sum(value.tobytes()) for value in values])),
        FieldSpec("varying", decode=lambda values: np.array([value.sum() for value in values])),
        FieldSpec("table", member="name", decode=lambda values: np.array([len(value) for value in values])),
        FieldSpec("table", decode=lambda rows: np.array([len(name) for name in rows["name"]])),
    )
    assert len(found) == 5
    for name, values in found.items():
        np.testing.assert_array_equal(values, sizes, err_msg=name)


def test_time_cannot_be_decoded(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        h5py.h5d.create(file.id, b"y", h5py.h5t.UNIX_D64LE, h5py.h5s.create_simple((3,)), plist)
    with pytest.raises(DataError, match=r'"y" has type H5T_TIME, which no tensor can hold'):
        describe(tmp_path / "a.h5", ["y"])
    with pytest.raises(DataError, match=r'"y" cannot be read.*its type is H5T_TIME'):
        describe(tmp_path / "a.h5", [FieldSpec("y", decode=lambda values: values)])


@SLOW
@pytest.mark.parametrize("base", ["i1", "u1", ">i4"])
@pytest.mark.parametrize("names", [("F", "T"), ("no", "yes"), ("FALSE", "TRUE"), ("true", "false")])
def test_two_valued_enums(tmp_path: Path, names: tuple[str, str], base: str) -> None:
    """Whatever 0 and 1 are called, they are false and true; in datasets, arrays and members alike."""
    values = np.arange(ROWS) % 3 == 0
    kind = h5py.enum_dtype(dict(zip(names, (0, 1), strict=True)), basetype=base)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=values.astype(base), dtype=kind)
        table = h5py.h5t.create(h5py.h5t.COMPOUND, np.dtype(base).itemsize)
        table.insert(b"ok", 0, h5py.h5t.py_create(kind, logical=True))
        h5py.h5d.create(file.id, b"t", table, h5py.h5s.create_simple((ROWS,)))
        file["t"][...] = values.astype(base).view([("ok", base)])
    found = load(
        tmp_path / "a.h5",
        "x",
        FieldSpec("t", member="ok"),
        FieldSpec("x", name="asked", dtype="bool"),
        FieldSpec("x", name="number", dtype="float32"),
    )
    assert [values.dtype for values in found.values()] == [torch.bool, torch.bool, torch.bool, torch.float32]
    for name, read in found.items():
        np.testing.assert_array_equal(read, values, err_msg=name)


@SLOW
def test_bit_fields_of_one_byte(tmp_path: Path) -> None:
    """As PyTables writes booleans; other values are an error that says how to read them."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name in ("x", "flags"):
            h5py.h5d.create(file.id, name.encode(), h5py.h5t.STD_B8LE, h5py.h5s.create_simple((4,)))
        file["x"].id.write(h5py.h5s.ALL, h5py.h5s.ALL, np.array([0, 1, 1, 0], "u1"), h5py.h5t.STD_B8LE)
        file["flags"].id.write(h5py.h5s.ALL, h5py.h5s.ALL, np.array([0, 1, 1, 12], "u1"), h5py.h5t.STD_B8LE)
    found = load(tmp_path / "a.h5", "x", FieldSpec("flags", dtype="uint8"))
    assert found["x"].dtype == torch.bool and found["x"].tolist() == [False, True, True, False]
    assert found["flags"].tolist() == [0, 1, 1, 12]
    with pytest.raises(
        DataError, match=r'"flags", rows .*holds 12, which is neither false .*give dtype, such as uint8'
    ):
        load(tmp_path / "a.h5", "flags")


def test_other_enums_are_no_booleans(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (3,), h5py.enum_dtype({"a": 1, "b": 2}))[:] = 1
    assert describe(tmp_path / "a.h5", ["x"]).fields[0].dtype == np.uint8
    with pytest.raises(DataError, match="numbers are not true or false"):
        describe(tmp_path / "a.h5", [FieldSpec("x", dtype="bool")])


def undefine_fill(path: Path) -> Path:
    """Change HDF5's message of a fill value, of version 2, from the default to undefined."""
    content, defined, undefined = path.read_bytes(), b"\2\3\2\1\0\0\0\0", b"\2\3\2\0\0\0\0\0"
    assert content.count(defined) == 1
    path.write_bytes(content.replace(defined, undefined))
    return path


def test_undefined_fill_values(tmp_path: Path) -> None:
    """Behaviour 27: without harm where all was written; where not, there is nothing to be read, allowed or not."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver="earliest") as file:
        file.create_dataset("x", data=np.arange(40).reshape(20, 2), chunks=(5, 2))
    assert load(undefine_fill(path), "x")["x"].tolist() == np.arange(40).reshape(20, 2).tolist()
    with h5py.File(path, "w", libver="earliest") as file:
        file.create_dataset("x", (20, 2), "i8", chunks=(5, 2))[:5] = 1
    with pytest.raises(DataError, match=r'"/x" .*never written, and no fill value'):
        describe(undefine_fill(path), ["x"], allow_holes=True)


PACKED = np.array([100, -32767, 200, 300, -1] * 4, "i2")


def write_packed(path: Path, scale: Any, offset: Any, **attributes: Any) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("t2m", data=PACKED, chunks=(8,), compression="gzip")
        file["t2m"].attrs.update({"scale_factor": scale, "add_offset": offset, **attributes})
    return path


def test_packed_values_are_unpacked_when_asked(tmp_path: Path) -> None:
    """Each file by its own scale and offset; fill and missing values are NaN; float64 where the attributes are."""
    one = write_packed(tmp_path / "1.nc", np.float32([0.5]), np.float32(280), _FillValue=np.int16([-32767]))
    two = write_packed(tmp_path / "2.nc", np.float32(2), np.float32([1]), missing_value=np.int16([-1, -32767]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = load([one, two], FieldSpec("t2m", cf=True), FieldSpec("t2m", name="plus", cf=True, offset=1.0))
    values = PACKED.astype("f4")
    first = np.where(PACKED == -32767, np.nan, values * np.float32(0.5) + np.float32(280))
    second = np.where((PACKED == -32767) | (PACKED == -1), np.nan, values * 2 + 1)
    assert found["t2m"].dtype == torch.float32
    np.testing.assert_array_equal(found["t2m"], np.concatenate([first, second]))
    np.testing.assert_array_equal(found["plus"], np.concatenate([first, second]) + 1)
    wide = load(write_packed(tmp_path / "3.nc", 0.01, 280.0), FieldSpec("t2m", cf=True))["t2m"]
    assert wide.dtype == torch.float64
    np.testing.assert_array_equal(wide, PACKED * 0.01 + 280.0)
    narrow = load(tmp_path / "3.nc", FieldSpec("t2m", cf=True, dtype="float32"))["t2m"]
    np.testing.assert_array_equal(narrow, (PACKED * 0.01 + 280.0).astype("f4"))


def test_packed_values_are_announced(tmp_path: Path) -> None:
    path = write_packed(tmp_path / "a.nc", 0.01, 280.0, _FillValue=np.int16(-32767))
    with pytest.warns(UserWarning, match=r'"t2m" has the attributes _FillValue, scale_factor, add_offset .*cf=True'):
        assert load(path, "t2m")["t2m"].tolist() == PACKED.tolist()


def test_attributes_that_change_nothing_are_not_announced(tmp_path: Path) -> None:
    """NaN is missing as it is; a scale of 1 and an offset of 0 change nothing; text is no value."""
    with h5py.File(tmp_path / "a.nc", "w") as file:
        file["x"] = np.array([1, np.nan, 3], "f4")
        file["x"].attrs.update({"_FillValue": np.float32(np.nan), "scale_factor": 1.0, "missing_value": "none"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = load(tmp_path / "a.nc", "x", FieldSpec("x", name="y", cf=True))
    np.testing.assert_array_equal(found["x"], found["y"])


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"dtype": "int32"}, "scale, offset or cf and dtype int32"),
        ({"decode": np.sqrt}, "cf and decode or member"),
        ({"member": "a"}, "cf and decode or member"),
    ],
)
def test_cf_with_what_it_does_not_go_with(spec: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        FieldSpec("x", cf=True, **spec)


def test_what_programs_keep_for_themselves_is_not_offered(tmp_path: Path) -> None:
    """Dimensions of netCDF without variables, and PyTables' indices, hold nothing to train on."""
    with h5py.File(tmp_path / "a.nc", "w") as file:
        file["tas"] = np.zeros(4)
        file.create_dataset("bnds", (2,), ">f4").make_scale(
            "This is a netCDF dimension but not a netCDF variable.         2"
        )
        file["_i_table/energy/sorted"] = np.zeros(4)
    with pytest.raises(DataError) as error:
        describe(tmp_path / "a.nc", ["tos"])
    assert 'did you mean "tas"' in str(error.value)
    assert "bnds" not in str(error.value) and "sorted" not in str(error.value)
    with pytest.raises(DataError, match='"bnds" is a dimension of netCDF without a variable'):
        describe(tmp_path / "a.nc", ["bnds"], allow_holes=True)


@pytest.mark.parametrize("attribute", [("encoding-type", "csr_matrix"), ("h5sparse_format", "csc")])
def test_sparse_matrices_are_named(tmp_path: Path, attribute: tuple[str, str]) -> None:
    with h5py.File(tmp_path / "a.h5ad", "w") as file:
        file["X/data"], file["X/indices"], file["X/indptr"] = [1.0], [0], [0, 1]
        file["X"].attrs[attribute[0]] = attribute[1]
    with pytest.raises(DataError, match=f'"X" is a sparse matrix .{attribute[1]}.*write it dense'):
        describe(tmp_path / "a.h5ad", ["X"])


def test_a_group_for_each_sample(tmp_path: Path) -> None:
    """A short answer that says what to do."""
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        for number in range(5000):
            group = file.create_group(f"sample_{number}")
            group["x"] = 1.0
    with pytest.raises(DataError, match=r'dataset "x" of their own.*mpidp data convert .*a.h5 NEW.h5 stacks') as error:
        describe(tmp_path / "a.h5", ["x"])
    assert len(str(error.value)) < 1000
    assert len(re.findall("sample_", str(error.value))) <= 11


def test_external_links_to_pipes(tmp_path: Path) -> None:
    """Behaviour 57: HDF5 would open the pipe, and wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["group"] = h5py.ExternalLink("pipe", "/x"), h5py.ExternalLink(str(tmp_path / "pipe"), "/")
    for name in ("x", "group/x"):
        with pytest.raises(DataError, match=r"is an external link to .*pipe, which is no regular file"):
            describe(tmp_path / "a.h5", [name])


@SLOW
@pytest.mark.parametrize("locking", [None, True, False])
def test_the_users_program_opens_what_the_loader_reads(tmp_path: Path, locking: bool | None) -> None:
    """Where HDF5 itself reads, too: the user's openings may lock as they like, and write."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        kind = h5py.enum_dtype({"FALSE": 0, "TRUE": 1}, basetype="i2")
        file.create_dataset("x", data=np.zeros(100, "i2"), dtype=kind)
    with closing(HDF5Loader(path, ("x",), 10)) as loader:
        for _ in loader:
            with h5py.File(path, locking=locking) as file:
                assert file["x"].shape == (100,)
    with h5py.File(path, "a", locking=locking) as file:
        file["y"] = 1


@SLOW
def test_what_this_process_has_not_yet_written(tmp_path: Path) -> None:
    """A file that is open for writing here, of which HDF5 keeps a part in memory: that is read, too."""
    kind = h5py.enum_dtype({"FALSE": 0, "TRUE": 1}, basetype="i2")  # which HDF5 reads itself
    with h5py.File(tmp_path / "a.h5", "w", libver="earliest") as file:
        file.flush()
        file.create_dataset("x", data=np.arange(30, dtype="i2") % 2, dtype=kind, chunks=(5,))
        assert load(tmp_path / "a.h5", "x")["x"].tolist() == [False, True] * 15


def test_damage_beside_a_field_is_named_when_names_are_listed(tmp_path: Path) -> None:
    """Behaviour 57: a misspelt name in a file with a damaged neighbour."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver="earliest") as file:
        file["good"], file["broken"] = np.arange(20.0), np.arange(20)
        start = h5py.h5o.get_info(file["broken"].id).addr
    content = bytearray(path.read_bytes())
    content[start] ^= 4
    path.write_bytes(content)
    with pytest.raises(DataError, match=r'no dataset "godo"; did you mean "good".*broken \(damaged: '):
        describe(path, ["godo"])
    with pytest.raises(DataError, match='dataset "broken" cannot be opened; the file may be damaged'):
        describe(path, ["broken"])
    assert describe(path, ["good"]).num_rows == 20


def damaged(path: Path, found: bytes, put: bytes, **options: Any) -> Path:
    """Write a dataset "x" of 20 rows of 4 float32 and replace the only place of some bytes."""
    with h5py.File(path, "w", libver="earliest") as file:
        file.create_dataset("x", data=np.arange(1, 81, dtype="f4").reshape(20, 4), **options)
        chunks: list[int] = []
        if options:
            file["x"].id.chunk_iter(lambda chunk: chunks.append(chunk.byte_offset))
    content = path.read_bytes()
    found, put = (struct.pack("<Q", chunks[2] + int(each)) if each.isdigit() else each for each in (found, put))
    assert content.count(found) == 1
    path.write_bytes(content.replace(found, put))
    return path


CHUNKS = {"chunks": (5, 4)}
DAMAGE: dict[str, tuple[bytes, bytes, dict[str, Any], str]] = {
    "address of a chunk, 2^63": (
        b"0",
        str(2**63).encode(),
        CHUNKS,
        r"the chunk at \(10, 0\) is said to be 80 bytes at",
    ),
    "address of a chunk, 2^62": (
        b"0",
        str(2**62).encode(),
        CHUNKS,
        r"the chunk at \(10, 0\) is said to be 80 bytes at",
    ),
    "address of a chunk, beyond the end": (b"0", b"100000", CHUNKS, r"the chunk at \(10, 0\) .* file is damaged"),
    "elements of the shuffle filter": (
        b"shuffle\0\4\0\0\0",
        b"shuffle\0\4\0\0\xfe",
        {**CHUNKS, "shuffle": True},
        "filter shuffle was written for elements of 4261412868 bytes, but they have 4",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_places_and_sizes_that_cannot_be(tmp_path: Path, case: str) -> None:
    """Behaviours 56 and 57: refused at opening, by file, dataset and chunk, before anything is allocated."""
    found, put, options, text = DAMAGE[case]
    path = damaged(tmp_path / "a.h5", found, put, **options)
    with pytest.raises(DataError, match=f'{path}: dataset "/x".*{text}'):
        describe(path, ["x"])


def test_shapes_of_chunks_are_bounded(tmp_path: Path) -> None:
    """Behaviour 56: a file of some kilobytes may not ask for gigabytes, nor for a table of 2^40 chunks."""
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        file.create_dataset("x", (2**40, 1), "f4", chunks=(1, 1), maxshape=(None, 1))[:4] = 1
    with pytest.raises(DataError, match="has 1099511627776 chunks of 4 bytes; at most"):
        describe(tmp_path / "a.h5", ["x"], allow_holes=True)
