"""Where the bytes of datasets lie, in files of every layout; what goes the slow path, and why. Values equal h5py's."""

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hdf5_rows import all_rows, low_level, read_rows, same_as_h5py

from mpidp.errors import DataError
from mpidp.hdf5 import decode
from mpidp.hdf5.field import FieldSpec
from mpidp.hdf5.files import locate
from mpidp.hdf5.files.describe import describe
from mpidp.hdf5.read import RowReader, Selection

# Each kind of index that HDF5 keeps of its chunks.
INDICES: dict[str, tuple[str, dict[str, Any]]] = {
    "b-tree 1": ("earliest", {"chunks": (3, 4)}),
    "single chunk": ("latest", {"chunks": (50, 10)}),
    "single chunk, filtered": ("latest", {"chunks": (50, 10), "compression": "gzip"}),
    "fixed array": ("latest", {"chunks": (3, 4)}),
    "fixed array, filtered": ("latest", {"chunks": (3, 4), "compression": "gzip"}),
    "extensible array": ("latest", {"chunks": (3, 4), "maxshape": (None, 10)}),
    "extensible array, filtered": ("latest", {"chunks": (3, 4), "maxshape": (None, 10), "compression": "lzf"}),
    "b-tree 2": ("latest", {"chunks": (3, 4), "maxshape": (None, None)}),
    "b-tree 2, filtered": ("latest", {"chunks": (3, 4), "maxshape": (None, None), "compression": "gzip"}),
    "chunk larger than the data": ("earliest", {"chunks": (64, 16), "maxshape": (None, None)}),
    "contiguous": ("earliest", {}),
    "contiguous, latest": ("latest", {}),
}


@pytest.mark.parametrize("user_block", [0, 1024])
@pytest.mark.parametrize("index", INDICES)
def test_chunk_indices(tmp_path: Path, index: str, user_block: int) -> None:
    """Behaviour 27: all of HDF5's chunk indices, in files that begin with HDF5 and behind a user block."""
    libver, options = INDICES[index]
    values = np.random.default_rng(0).integers(0, 99, (50, 10))
    with h5py.File(tmp_path / "a.h5", "w", libver=libver, userblock_size=user_block) as file:
        file.create_dataset("x", data=values, **options)
    assert same_as_h5py(tmp_path / "a.h5").files[0].slow == ("",)


def test_implicit_index(tmp_path: Path) -> None:
    """Chunks that lie one after another, with no index at all: allocated early, of fixed number, without filters."""
    early = {"set_chunk": ((3, 4),), "set_alloc_time": (h5py.h5d.ALLOC_TIME_EARLY,)}
    values = np.arange(500).reshape(50, 10)
    path = low_level(tmp_path / "a.h5", h5py.h5t.STD_I32BE, (50, 10), values, "latest", **early)
    assert same_as_h5py(path).files[0].slow == ("",)


def test_index_with_many_pages(tmp_path: Path) -> None:
    """30,000 chunks, whose index a fixed array keeps in pages; visited once."""
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        file.create_dataset("x", data=np.arange(60_000), chunks=(2,))
    dataset = same_as_h5py(tmp_path / "a.h5")
    assert dataset.files[0].storages[0].offsets.shape == (30_000, 1)


def test_user_blocks_are_told_apart_by_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HDF5 releases differ in whether addresses count from the start of the file: both are tried."""
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=2048) as file:
        file.create_dataset("x", data=np.random.default_rng(0).random(5000), chunks=(700,))
    usual = same_as_h5py(tmp_path / "a.h5").files[0].storages[0].offsets
    real = locate._chunk_table

    def older(*of: Any) -> Any:
        places, facts = real(*of)
        return places, facts - np.array([2048, 0, 0], np.uint64)

    monkeypatch.setattr(locate, "_chunk_table", older)
    dataset = same_as_h5py(tmp_path / "a.h5")
    assert dataset.files[0].slow == ("",)
    np.testing.assert_array_equal(dataset.files[0].storages[0].offsets, usual)


def test_user_blocks_that_values_cannot_tell_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where everything that is compared is zero, both addresses look right: then neither is trusted."""
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=2048) as file:
        file["x"] = np.arange(5000)
    monkeypatch.setattr(locate, "_difference", lambda *_: "")
    dataset = same_as_h5py(tmp_path / "a.h5")
    assert dataset.files[0].storages == (None,)
    assert dataset.files[0].slow[0].endswith("from behind the user block of 2048 bytes")


@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (8, 6), (9, 7), (16, 12), (17, 1)])
@pytest.mark.parametrize("axis", [0, 1])
def test_tiles(tmp_path: Path, shape: tuple[int, int], axis: int) -> None:
    """Behaviour 27: chunks that split rows, and chunks at the edges, along every axis."""
    values = np.random.default_rng(0).normal(size=(*shape, 3)).astype(">f4")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(8, 6, 2), maxshape=(None, None, None), compression="gzip")
    dataset = same_as_h5py(tmp_path / "a.h5", FieldSpec("x", axis=axis))
    assert dataset.files[0].slow == ("",)


def test_scattered_and_far_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks written in any order, with other data between them: neighbours are read together, others are not."""
    order = np.random.default_rng(1).permutation(40)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        x = file.create_dataset("x", (400, 500), "i4", chunks=(10, 500))
        for chunk in order.tolist():
            x[10 * chunk : 10 * chunk + 10] = chunk
            file[f"other/{chunk}"] = np.zeros(50_000 * (chunk % 3 == 0))
    same_as_h5py(tmp_path / "a.h5")
    monkeypatch.setattr(decode, "_MOST_TOGETHER_BYTES", 50_000)
    same_as_h5py(tmp_path / "a.h5")


def test_compact_values_need_no_file(tmp_path: Path) -> None:
    """Values in the header of the dataset travel with the table."""
    path = low_level(
        tmp_path / "a.h5", h5py.h5t.STD_I16BE, (6, 2), np.arange(12).reshape(6, 2), set_layout=(h5py.h5d.COMPACT,)
    )
    dataset = same_as_h5py(path)
    path.unlink()
    np.testing.assert_array_equal(read_rows(dataset), np.arange(12).reshape(6, 2))


def test_external_links(tmp_path: Path) -> None:
    """Bytes lie in another file, found from the folder of the one that was asked for; its size is kept too."""
    (tmp_path / "sub").mkdir()
    with h5py.File(tmp_path / "sub" / "b.h5", "w", userblock_size=512) as file:
        file.create_dataset("deep/y", data=np.arange(30), chunks=(4,), compression="gzip")
    with h5py.File(tmp_path / "sub" / "middle.h5", "w") as file:
        file["z"] = h5py.ExternalLink("b.h5", "/deep/y")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = h5py.ExternalLink("sub/middle.h5", "/z")
        file["group"] = h5py.ExternalLink("sub/b.h5", "/deep")
    for name in ("x", "group/y"):
        dataset = same_as_h5py(tmp_path / "a.h5", name)
        assert dataset.files[0].slow == ("",)
        assert {os.path.realpath(path) for path in dataset.paths} == {
            str(tmp_path / "a.h5"),
            str(tmp_path / "sub" / "b.h5"),
        }


def test_allocated_early_and_written_in_part(tmp_path: Path) -> None:
    """Chunks that HDF5 filled when the dataset was made exist: they are data, as for h5py."""
    path = tmp_path / "a.h5"
    low_level(path, h5py.h5t.NATIVE_INT32, (50,), set_chunk=((8,),), set_alloc_time=(h5py.h5d.ALLOC_TIME_EARLY,))
    with h5py.File(path, "a") as file:
        file["x"][10:20] = 7
    same_as_h5py(path)


FILLS: dict[str, tuple[Any, Any]] = {
    "int": (h5py.h5t.STD_I32BE, np.array(-7, ">i4")),
    "float": (h5py.h5t.IEEE_F64LE, np.array(np.nan)),
    "none given": (h5py.h5t.IEEE_F32LE, None),
}


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("case", FILLS)
def test_holes_that_are_allowed(tmp_path: Path, case: str, filtered: bool) -> None:
    """Behaviour 27: never written chunks are an error, or the dataset's own fill value where that is allowed."""
    kind, fill = FILLS[case]
    settings: dict[str, Any] = {"set_chunk": ((8, 2),)}
    settings |= {"set_deflate": (4,)} if filtered else {}
    settings |= {} if fill is None else {"set_fill_value": (fill,)}
    path = low_level(tmp_path / "a.h5", kind, (50, 3), **settings)
    with h5py.File(path, "a") as file:
        file["x"][8:16], file["x"][40:45, :1] = 5, 6
    with pytest.raises(DataError, match="11 of its 14 chunks were never written"):
        describe(path, ("x",))
    assert same_as_h5py(path, allow_holes=True).files[0].slow == ("",)
    same_as_h5py(path, FieldSpec("x", axis=1), allow_holes=True)


def test_holes_of_bfloat16(tmp_path: Path) -> None:
    """The fill value, which h5py gives as float32, becomes bfloat16 too; the holes lie where no block is compared."""
    kind = h5py.h5t.IEEE_F16LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_ebias(127)
    path = low_level(tmp_path / "a.h5", kind, (40,), set_chunk=((4,),), set_fill_value=(np.array(1.5, "f4"),))
    with h5py.File(path, "a") as file:
        for chunk in (0, 5, 9):
            file["x"][4 * chunk : 4 * chunk + 4] = chunk
    dataset = same_as_h5py(path, FieldSpec("x", dtype="float32"), allow_holes=True)
    assert dataset.files[0].slow == ("",)


def _int(precision: int, offset: int = 0) -> Any:
    kind = h5py.h5t.STD_I32LE.copy()
    kind.set_precision(precision)
    kind.set_offset(offset)
    return kind


def _float() -> Any:
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(31, 25, 6, 0, 25)
    kind.set_ebias(31)
    return kind


def _swapped_complex() -> Any:
    kind = h5py.h5t.create(h5py.h5t.COMPOUND, 8)
    kind.insert(b"r", 4, h5py.h5t.IEEE_F32LE)
    kind.insert(b"i", 0, h5py.h5t.IEEE_F32LE)
    return kind


SLOW_TYPES: dict[str, tuple[Any, Any, str]] = {
    "24 bits of 32": (_int(24), np.arange(20) - 10, "do not use all of their bits"),
    "24 bits, shifted": (_int(24, 8), np.arange(20) - 10, "do not use all of their bits"),
    "odd float": (_float(), np.linspace(-1, 1, 20, dtype="f4"), "takes 4 bytes on disk, 8 in memory"),
    "imaginary part first": (_swapped_complex(), np.arange(20) + 1j, "HDF5 converts its values"),
}


@pytest.mark.parametrize("chunks", [None, (6,)])
@pytest.mark.parametrize("case", SLOW_TYPES)
def test_types_that_hdf5_converts(tmp_path: Path, case: str, chunks: tuple[int] | None) -> None:
    """Behaviour 27: bytes that look like a plain type and are not; comparing bytes would not tell."""
    kind, values, text = SLOW_TYPES[case]
    path = low_level(tmp_path / "a.h5", kind, (20,), values, **({"set_chunk": (chunks,)} if chunks else {}))
    dataset = same_as_h5py(path)
    assert text in dataset.files[0].slow[0] and dataset.files[0].storages == (None,)


@pytest.mark.parametrize("padding", ["NULLTERM", "SPACEPAD", "NULLPAD"])
def test_padding_of_strings(tmp_path: Path, padding: str) -> None:
    """Behaviour 27: a decode function gets what h5py would return."""
    kind = h5py.h5t.C_S1.copy()
    kind.set_size(6)
    kind.set_strpad(getattr(h5py.h5t, f"STR_{padding}"))
    path = low_level(tmp_path / "a.h5", kind, (3,))
    with h5py.File(path, "a") as file:
        file["x"].id.write(h5py.h5s.ALL, h5py.h5s.ALL, np.frombuffer(b"ab\0cd\0ab    abcdef", "S6"), kind)
        expected = file["x"][:].tolist()
    seen: list[bytes] = []

    def decode(words: np.ndarray) -> np.ndarray:
        seen.extend(words.tolist())
        return np.zeros(len(words))

    dataset = describe(path, (FieldSpec("x", decode=decode),))
    seen.clear()
    read_rows(dataset)
    assert seen == expected


SLOW_FILTERS: dict[str, dict[str, Any]] = {
    "scaleoffset": {"set_scaleoffset": (h5py.h5z.SO_INT, 0)},
    "szip": {"set_szip": (h5py.h5z.SZIP_NN_OPTION_MASK, 8)},
    "nbit": {"set_filter": (h5py.h5z.FILTER_NBIT, h5py.h5z.FLAG_OPTIONAL, ())},
}


@pytest.mark.parametrize("name", SLOW_FILTERS)
def test_filters_left_to_hdf5(tmp_path: Path, name: str) -> None:
    """Behaviour 27: the same values, and the reason."""
    if name == "szip" and "szip" not in h5py.filters.encode:
        pytest.skip("this HDF5 library was built without an szip encoder")
    kind = _int(24) if name == "nbit" else h5py.h5t.STD_I32LE
    values = np.arange(64) * 3
    path = low_level(tmp_path / "a.h5", kind, (64,), values, set_chunk=((16,),), **SLOW_FILTERS[name])
    dataset = same_as_h5py(path)
    assert dataset.files[0].storages == (None,)
    assert dataset.files[0].slow[0] in (
        f"filter {name} is undone by HDF5 only",
        "its integers do not use all of their bits",
    )


def test_what_differs_goes_the_slow_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reason may be: values are compared before addresses are trusted."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.arange(64), chunks=(16,))
    real = locate._chunk_table

    def earlier(*of: Any) -> Any:
        places, facts = real(*of)
        return places, facts - np.array([8, 0, 0], np.uint64)

    monkeypatch.setattr(locate, "_chunk_table", earlier)
    dataset = same_as_h5py(tmp_path / "a.h5")
    assert dataset.files[0].storages == (None,)
    assert "bytes read without HDF5 differ from its own reading (rows 0 to 15)" in dataset.files[0].slow[0]


def test_contiguous_rows_along_another_axis(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(24).reshape(2, 3, 4)
    dataset = same_as_h5py(tmp_path / "a.h5", FieldSpec("x", axis=-1))
    assert dataset.files[0].slow == ("without chunks, rows can only be read along the first axis",)


@pytest.mark.parametrize("flush", [False, True])
def test_a_writer_in_the_same_process(tmp_path: Path, flush: bool) -> None:
    """What the user's program wrote and HDF5 still keeps in memory is read too."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        x = file.create_dataset("x", data=np.zeros(100_000), chunks=(10_000,))
        if flush:
            file.flush()
        x[40_000:50_000] = 7
        np.testing.assert_array_equal(all_rows(tmp_path / "a.h5"), x[:])


def test_a_dataset_that_shrank_and_grew(tmp_path: Path) -> None:
    """Rows behind the former end are fill values, not what once was there."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        x = file.create_dataset("x", data=np.arange(1, 41), chunks=(8,), maxshape=(None,))
        x.resize((12,))
        x.resize((16,))
    same_as_h5py(tmp_path / "a.h5")


def test_rows_behind_four_gibibytes(tmp_path: Path) -> None:
    """Offsets of more than 32 bits, in a sparse file."""
    path = tmp_path / "a.h5"
    low_level(
        path,
        h5py.h5t.STD_U8LE,
        (5000, 2**20),
        set_alloc_time=(h5py.h5d.ALLOC_TIME_EARLY,),
        set_fill_time=(h5py.h5d.FILL_TIME_NEVER,),
    )
    with h5py.File(path, "a") as file:
        file["x"][4998] = np.arange(2**20) % 251
    assert os.stat(path).st_size > 2**32 and os.stat(path).st_blocks * 512 < 2**28
    dataset = describe(path, ("x",))
    assert dataset.files[0].slow == ("",)
    np.testing.assert_array_equal(read_rows(dataset, 4997, 4999), [np.zeros(2**20), np.arange(2**20) % 251])


def test_two_readers_of_values_whose_imaginary_part_comes_first(tmp_path: Path) -> None:
    """HDF5 gives the second reader of an open file the two parts as members of a compound."""
    kind, values, _ = SLOW_TYPES["imaginary part first"]
    dataset = describe(low_level(tmp_path / "a.h5", kind, (20,), values), ("x",))
    into = np.empty(20, "c8")
    with closing(RowReader(Selection(dataset))) as one, closing(RowReader(Selection(dataset))) as other:
        for reader in (one, other):
            reader.read_field(0, 0, 0, 20, into)
            np.testing.assert_array_equal(into, values)
            into[:] = 0
