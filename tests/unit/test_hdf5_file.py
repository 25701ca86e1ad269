"""What `describe` says of HDF5 files, right and wrong ones, and what is read of them."""

import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hdf5_rows import read_rows, write

from mpidp.errors import DataError
from mpidp.hdf5.files import file as file_module
from mpidp.hdf5.files.describe import check_present, describe
from mpidp.hdf5.read import PlainReader


def test_widening_keeps_large_values(tmp_path: Path) -> None:
    """Behaviour 27: unsigned values never wrap; those too large for int64 are refused, naming the rows."""
    path = write(
        tmp_path / "a.h5",
        small=np.array([0, 65535], "u2"),
        medium=np.array([0, 2**32 - 1], "u4"),
        large=np.array([2**63 - 1, 0], "u8"),
        wrapped=np.array([2**63 - 1, 2**63], "u8"),
    )
    dataset = describe(path, ("small", "medium", "large", "wrapped"))
    assert read_rows(dataset, number=0).tolist() == [0, 65535]
    assert read_rows(dataset, number=1).tolist() == [0, 2**32 - 1]
    assert read_rows(dataset, number=2).tolist() == [2**63 - 1, 0]
    with pytest.raises(DataError, match=r'"wrapped", rows 0 to 1: holds 9223372036854775808.*int64'):
        read_rows(dataset, number=3)


def test_chunks_follow_the_field_with_most_bytes(tmp_path: Path) -> None:
    y = (np.zeros(10, "i1"), {"chunks": (7,)})
    x = (np.zeros((10, 3000)), {"chunks": (4, 2000)})
    dataset = describe([write(tmp_path / "a.h5", x=x, y=y), write(tmp_path / "b.h5", x=x, y=y)], ("y", "x"))
    assert dataset.chunk_rows.tolist() == [4, 4, 2, 4, 4, 2]
    assert dataset.chunk_starts.tolist() == [0, 4, 8, 10, 14, 18]
    assert [dataset.file_of(row) for row in (0, 9, 10, 19)] == [(0, 0), (0, 9), (1, 0), (1, 9)]
    assert (dataset.num_rows, dataset.row_bytes) == (20, 24001)
    again = pickle.loads(pickle.dumps(dataset))
    assert again.fields == dataset.fields and again.paths == dataset.paths
    np.testing.assert_array_equal(again.files[1].storages[0].offsets, dataset.files[1].storages[0].offsets)


@pytest.mark.parametrize(
    ("rows", "chunk", "range_rows"),
    [(5000, 64, 64), (2**18, 64, 4 * 64), (2**23, 64, 64 * 64), (2**21, None, 2**11), (5000, None, 4)],
)
def test_small_chunks_are_read_several_at_a_time(tmp_path: Path, rows: int, chunk: int | None, range_rows: int) -> None:
    """Whole chunks, up to 64 KiB, or 1 MiB without chunks, as long as a thousand ranges remain to be shuffled."""
    options: dict[str, Any] = {"chunks": (chunk, 16), "maxshape": (None, 16)} if chunk else {}
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (rows, 16), "u1", **options)[0] = 1
    dataset = describe(tmp_path / "a.h5", ("x",), allow_holes=True)
    assert dataset.files[0].range_rows == range_rows
    assert dataset.chunk_rows.sum() == rows and set(dataset.chunk_rows[:-1].tolist()) == {range_rows}


def _truncated(path: Path) -> None:
    write(path, x=np.zeros(5000))
    os.truncate(path, os.path.getsize(path) - 1234)


def _never_written(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (10, 3), "f4", chunks=(4, 3))[:4] = 1


def _never_written_contiguous(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (10, 3), "f4")


def _unknown_filter(path: Path) -> None:
    with h5py.File(path, "w") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((4,))
        plist.set_filter(32768, h5py.h5z.FLAG_OPTIONAL, (0,))  # a number that no filter is registered under
        space = h5py.h5s.create_simple((8,))
        h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_INT32, space, plist)


def _link(target: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with h5py.File(path, "w") as file:
            file["x"] = target

    return write


def _virtual(path: Path) -> None:
    layout = h5py.VirtualLayout((10,), "f4")
    layout[:] = h5py.VirtualSource("gone.h5", "x", (10,))
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("x", layout)


def _of_type(dtype: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with h5py.File(path, "w") as file:
            file.create_dataset("x", (3,), dtype)

    return write


def _still_open(path: Path) -> None:
    with h5py.File(path.with_suffix(".writing"), "w", libver="latest") as file:
        file["x"] = [1]
        file.flush()
        path.write_bytes(path.with_suffix(".writing").read_bytes())


def _holds(**datasets: Any) -> Callable[[Path], Any]:
    return lambda path: write(path, **datasets)


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda path: None, "no such file; check the path"),
    "folder": (lambda path: path.mkdir(), "this is a folder"),
    "not HDF5": (lambda path: path.write_text("version https://git-lfs"), "not an HDF5 file: 23 bytes.*git-lfs"),
    "empty file": (lambda path: path.touch(), "not an HDF5 file: 0 bytes"),
    "truncated": (_truncated, "truncated, 1234 bytes are missing.*truncated file: eof"),
    "open for writing": (_still_open, "did not close it.*already open for write"),
    "no such dataset": (_holds(xs=np.zeros((2, 3)), z=[1]), r'did you mean "xs"\? .*xs \(2, 3\) float64, z \(1,\)'),
    "no dataset at all": (_holds(), 'no dataset "x"; The file holds: no datasets'),
    "group": (_holds(**{"x/images": [1]}), r'"x" is a group, not a dataset.*x/images \(1,\) int64'),
    "single value": (_holds(x=3.0), "is a single value"),
    "no dataspace": (_link(h5py.Empty("f4")), "has no dataspace"),
    "no rows": (_holds(x=np.zeros((0, 3))), "have no rows"),
    "no values": (_holds(x=np.zeros((3, 0))), "hold no values"),
    "never written": (_never_written, "2 of its 3 chunks were never written"),
    "never written, contiguous": (_never_written_contiguous, "all of it was never written"),
    "unknown filter": (_unknown_filter, "filter 32768 .*pip install hdf5plugin"),
    "external link": (_link(h5py.ExternalLink("gone.h5", "/y")), 'external link to "/y" in gone.h5.*cannot be'),
    "soft link": (_link(h5py.SoftLink("/gone")), 'link to "/gone", which does not exist'),
    "virtual": (_virtual, "a virtual dataset over gone.h5"),
    "string": (_holds(x=["a", "b"]), "has type string"),
    "fixed string": (_holds(x=np.array([b"a"])), "has type string"),
    "variable length": (_of_type(h5py.vlen_dtype(np.int32)), "has type variable-length array"),
    "reference": (_of_type(h5py.ref_dtype), "has type object or region reference"),
    "compound": (_of_type(np.dtype([("a", "i4")])), "has type compound"),
    "array type": (_of_type(np.dtype(("S4", (3,)))), "has type array of string"),
    "opaque": (_of_type(np.dtype("V4")), "has type opaque"),
    "long double": (_of_type(np.longdouble), "has type float128"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files(tmp_path: Path, case: str) -> None:
    """Behaviours 27 and 29: one message that names the file, says what was found and what to do."""
    write, text = WRONG[case]
    path = tmp_path / "data.h5"
    write(path)
    with pytest.raises(DataError, match=f"(?s){path}.*{text}"):
        describe(path, ("x",))


def test_lengths_differ(tmp_path: Path) -> None:
    """Behaviour 29: all fields are named with their lengths."""
    path = write(tmp_path / "a.h5", x=np.zeros((5, 2)), y=np.zeros(4), z=np.zeros(5))
    with pytest.raises(DataError, match='"x" has 5, "y" has 4, "z" has 5'):
        describe(path, ("x", "y", "z"))


@pytest.mark.parametrize("other", [np.zeros((3, 2), "f4"), np.zeros((3, 4), "f8")])
def test_files_of_one_data_set_must_agree(tmp_path: Path, other: np.ndarray) -> None:
    first, second = write(tmp_path / "a.h5", x=np.zeros((3, 2))), write(tmp_path / "b.h5", x=other)
    with pytest.raises(DataError, match=r'(?s)"x" is float64 of shape \(2,\).*a\.h5.*b\.h5'):
        describe([first, second], ("x",))


def test_enumerations_are_their_numbers(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=[3, 1], dtype=h5py.enum_dtype({"A": 1, "B": 3}, ">i2"))
    dataset = describe(tmp_path / "a.h5", ("x",))
    assert dataset.fields[0].dtype == np.dtype("i2")
    assert read_rows(dataset, 0, 2).tolist() == [3, 1]


def test_paths_and_fields_that_cannot_be(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", x=[1])
    with pytest.raises(DataError, match="no file was given"):
        describe([], ("x",))
    with pytest.raises(DataError, match=r"a\.h5: given more than once"):
        describe([path, tmp_path / "." / "a.h5"], ("x",))
    (tmp_path / "link.h5").symlink_to(path)
    with pytest.raises(DataError, match=r"link\.h5: given more than once, also as .*a\.h5"):
        describe([path, tmp_path / "link.h5"], ("x",))
    for fields in ("x", (), ("x", "x")):
        with pytest.raises(DataError, match="sequence of different dataset names"):
            describe(path, fields)


def test_permission_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behaviour 29. Tests may run as root, who is never refused, so HDF5's answer is played back."""
    path = write(tmp_path / "a.h5", x=[1])

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "unable to open file")

    monkeypatch.setattr(file_module.h5py, "File", refuse)
    with pytest.raises(DataError, match=r"a\.h5: permission denied"):
        describe(path, ("x",))


@pytest.mark.parametrize("locking", [None, False])
def test_the_users_program_may_have_the_file_open(tmp_path: Path, locking: bool | None) -> None:
    path = write(tmp_path / "a.h5", x=[1])
    with h5py.File(path, locking=locking) as file:
        assert describe(path, ("x",)).num_rows == len(file["x"])


def test_other_nodes_must_see_the_same_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", x=[1])
    dataset = describe(path, ("x",))
    check_present(dataset)
    os.truncate(path, 100)
    with pytest.raises(DataError, match="100 bytes here"):
        check_present(dataset)
    path.unlink()
    with pytest.raises(DataError, match="rank 0 reads it, but here: No such file"):
        check_present(dataset)


def test_few_files_stay_open(tmp_path: Path) -> None:
    """Behaviour 28: the number of open files is bounded, whatever the number of files."""
    paths = [write(tmp_path / f"{number}.h5", x=[number]) for number in range(9)]
    dataset = describe(paths, ("x",))
    reader = PlainReader(dataset, most_open=3)
    for number in [*range(9), *range(9)]:
        assert reader.read(number, dataset.fields[0], 0, 1).tolist() == [number]
        assert len(_open_descriptors(tmp_path)) <= 3
    reader.close()
    assert not _open_descriptors(tmp_path)


class _Flaky:
    """Stands for a dataset on a network file system: reading fails a few times, then works."""

    def __init__(self, failures: int, error: OSError) -> None:
        self.failures, self.error = failures, error

    def __call__(self, *_: Any) -> "_Flaky":
        return self

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self
        self.failures -= 1
        if self.failures >= 0:
            raise self.error
        return np.array([5])

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("failures", "error", "works"),
    [
        (2, OSError(errno.EIO, "Input/output error"), True),
        (2, OSError("Can't read data (file read failed: errno = 116, error message = 'Stale file')"), True),
        (9, OSError(errno.EIO, "Input/output error"), False),
        (1, OSError("Can't synchronously read data (inflate() failed)"), False),
    ],
)
def test_errors_that_may_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, error: OSError, works: bool
) -> None:
    """Behaviour 29: bounded retries for errors of the network, then file, dataset and rows are named."""
    dataset = describe(write(tmp_path / "a.h5", x=[5, 6]), ("x",))
    pauses: list[float] = []
    monkeypatch.setattr("mpidp.hdf5.decode.time.sleep", pauses.append)
    monkeypatch.setattr("mpidp.hdf5.read.open_apart", _Flaky(failures, error))
    reader = PlainReader(dataset)
    if works:
        assert reader.read(0, dataset.fields[0], 0, 1).tolist() == [5]
        assert len(pauses) == failures
    else:
        with pytest.raises(DataError, match="cannot be read; the file may be damaged"):
            reader.read(0, dataset.fields[0], 0, 1)
        assert len(pauses) <= 3


def test_damaged_chunk_is_named(tmp_path: Path) -> None:
    """Behaviour 29: a chunk that cannot be decompressed."""
    values = np.random.default_rng(0).normal(size=(64, 1024))
    path = write(tmp_path / "a.h5", x=(values, {"chunks": (16, 1024), "compression": "gzip"}))
    with h5py.File(path) as file:
        chunk = file["x"].id.get_chunk_info(1)
    with path.open("r+b") as raw:
        raw.seek(chunk.byte_offset + 10)
        raw.write(bytes(200))
    dataset = describe(path, ("x",))
    assert read_rows(dataset, 0, 16).shape == (16, 1024)
    with pytest.raises(DataError, match=r'"x", rows 16 to 31: chunk at byte .*a\.h5: filter deflate cannot be undone'):
        read_rows(dataset, 16, 32)


def _open_descriptors(under: Path) -> list[str]:
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        if descriptor.exists() and str(descriptor.readlink()).startswith(str(under)):
            found.append(str(descriptor.readlink()))
    return found
