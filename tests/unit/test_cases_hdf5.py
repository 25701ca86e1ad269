"""Troubles that users of HDF5 loaders reported, each a file made here: exact values, or an error that says what to do.

Held elsewhere: pickled handles (`test_hdf5_file`: chunks follow ... pickles the table), a page read wrongly and errors
of network file systems (`test_rows`), more files than may be open (`test_open_files`), never written chunks, offsets
beyond 32 bits and tables of many chunks (`test_locate`), files open for writing, truncated, of unequal lengths,
scalars, empty datasets, variable lengths, references, missing plugins (`test_hdf5_file`: wrong files), lists of indices
and byte order (`test_matrix`), unsigned integers (`test_convert`), samples along the last axis (`test_field`),
permutations of 10^10 rows (`test_order`), unequal step counts and padded evaluation (`test_modes` on several ranks),
growing memory (`test_soak`), large chunks read for single rows (`test_budget`), pinned memory (`test_device_copy`), a
spawned worker that imports MPI (`test_loader_passes`: an open pass).
"""

import fcntl
import os
import signal
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
from hdf5_rows import all_rows, write

from mpidp.errors import DataError
from mpidp.hdf5.field import FieldSpec
from mpidp.hdf5.files.describe import describe
from mpidp.hdf5.loader import HDF5Loader


def _next_in_child(batches: Any, results: Any) -> None:
    signal.alarm(20)  # a child that waits for a thread of its parent would wait for ever
    try:
        results.put(f"got {next(batches)}")
    except Exception as error:
        results.put(f"{type(error).__name__}: {error}")


@pytest.mark.job
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("started", [False, True])
def test_a_loader_used_by_a_forked_worker(tmp_path: Path, started: bool) -> None:
    """Wrong data, a hang or a crash elsewhere; here an error, whether the threads were running or not."""
    loader = HDF5Loader(write(tmp_path / "a.h5", x=np.arange(60)), ("x",), 4)
    batches = iter(loader)
    if started:
        next(batches)
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_next_in_child, args=(batches, _Sender(sender)))
    child.start()
    sender.close()
    try:
        message = receiver.recv()
    except EOFError:
        message = "the child ended without a word"
    child.join()
    assert message.startswith("DataError: this loader was made in process"), message
    assert sum(batch.size for batch in batches) == (56 if started else 60)  # the parent goes on
    loader.close()


class _Sender:
    def __init__(self, connection: Any) -> None:
        self.put = connection.send


LOCKS = {"shared": fcntl.LOCK_SH, "exclusive": fcntl.LOCK_EX}


@pytest.mark.parametrize("kind", LOCKS)
def test_unable_to_lock_file(tmp_path: Path, kind: str) -> None:
    """Errno 11, 37 and 524: no lock is asked for, so that none can be refused."""
    path = write(tmp_path / "a.h5", x=np.arange(5))
    with path.open("rb") as held:
        fcntl.flock(held, LOCKS[kind])
        fcntl.lockf(held, fcntl.LOCK_SH)
        assert all_rows(path).tolist() == list(range(5))


@pytest.mark.job
def test_locks_that_the_environment_asks_for(tmp_path: Path) -> None:
    """A variable of HDF5's overrules what programs ask for: the message names it."""
    path = write(tmp_path / "a.h5", x=np.arange(5))
    program = f"from mpidp.hdf5.files.describe import describe\ndescribe({str(path)!r}, ('x',))"
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        environment = {**os.environ, "HDF5_USE_FILE_LOCKING": "TRUE"}
        ended = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
        )
    assert ended.returncode == 1
    assert "HDF5_USE_FILE_LOCKING=FALSE" in ended.stderr.splitlines()[-1]


@pytest.mark.job
def test_required_filter_is_not_registered(tmp_path: Path) -> None:
    """Without the package that brings the filter, it is named at construction, with the package."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.arange(50), chunks=(10,), **hdf5plugin.Blosc())
    program = (
        "import sys\nsys.modules['hdf5plugin'] = None\nfrom mpidp.hdf5.files.describe import describe\n"
        f"describe({str(tmp_path / 'a.h5')!r}, ('x',))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "HDF5_PLUGIN_PATH"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert 'dataset "x" is compressed with filter 32001 (' in last and "pip install hdf5plugin" in last


@pytest.fixture
def matlab(tmp_path: Path) -> Path:
    """As MATLAB 7.3 writes: a user block with a header, reversed axes, cells that are references."""
    path = tmp_path / "a.mat"
    with h5py.File(path, "w", userblock_size=512) as file:
        for name, values in (
            ("images", np.arange(4 * 3 * 10, dtype="u1").reshape(4, 3, 10)),
            ("labels", np.arange(10.0)[None]),
        ):
            file.create_dataset(name, data=values, chunks=values.shape, compression="gzip")
            file[name].attrs["MATLAB_class"] = np.bytes_(str(values.dtype).replace("float64", "double"))
        file["#refs#/a"] = np.arange(3)
        cells = file.create_dataset("cells", (1, 1), h5py.ref_dtype)
        cells[0, 0] = file["#refs#/a"].ref
        cells.attrs["MATLAB_class"] = np.bytes_("cell")
    with path.open("r+b") as raw:
        raw.write(b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(116) + bytes(8) + b"\x00\x02IM")
    return path


def test_matlab_axes_are_reversed(matlab: Path) -> None:
    """Told where the first axis is taken, not where the last is asked for; values are right."""
    expected = np.moveaxis(np.arange(120, dtype="u1").reshape(4, 3, 10), 2, 0)
    np.testing.assert_array_equal(all_rows(matlab, FieldSpec("images", axis=-1)), expected)
    np.testing.assert_array_equal(
        all_rows(matlab, FieldSpec("labels", axis=-1, dtype="float32")), np.arange(10.0)[:, None]
    )
    with pytest.warns(UserWarning, match=r"\(uint8\): its axes are reversed. Its shape here is \(4, 3, 10\)"):
        describe(matlab, ("images",))
    with pytest.raises(DataError, match='"cells" has type object or region reference, which no tensor can hold'):
        describe(matlab, ("cells",))


def test_virtual_datasets_whose_sources_are_there(tmp_path: Path) -> None:
    """Refused too: with more sources than descriptors, rows would silently be fill values."""
    layout = h5py.VirtualLayout((30,), "i8")
    for part in range(3):
        write(tmp_path / f"{part}.h5", x=np.arange(10) + 10 * part)
        layout[10 * part : 10 * part + 10] = h5py.VirtualSource(tmp_path / f"{part}.h5", "x", (10,))
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file.create_virtual_dataset("x", layout, fillvalue=-1)
    with pytest.raises(DataError, match=r"virtual dataset over .*0\.h5.*give the files that hold the values as paths"):
        describe(tmp_path / "v.h5", ("x",))
    assert all_rows([tmp_path / f"{part}.h5" for part in range(3)]).tolist() == list(range(30))


def test_external_storage(tmp_path: Path) -> None:
    """Raw files beside the HDF5 file: one that is missing reads as fill values, so all are refused."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.arange(4), external=[(str(tmp_path / "raw.bin"), 0, 32)])
    (tmp_path / "raw.bin").unlink()
    with pytest.raises(DataError, match=r'dataset "x" is stored in other files: .*raw\.bin'):
        describe(tmp_path / "a.h5", ("x",))


SOFT, ELSEWHERE = h5py.SoftLink, h5py.ExternalLink
LINKS: dict[str, tuple[dict[str, Any], str]] = {
    "in a circle": ({"a": SOFT("/b"), "b": SOFT("/a"), "x": SOFT("/a")}, r'x is a link to "/a"'),
    "through a group elsewhere": (
        {"real": ELSEWHERE("there.h5", "/group"), "x": SOFT("/real/gone")},
        r'x is a link to "/real/gone", which does not exist',
    ),
    "no such object": ({"x": ELSEWHERE("there.h5", "/gone")}, r'x is an external link to "/gone" in there\.h5'),
    "not HDF5": (
        {"x": ELSEWHERE("text.txt", "/x")},
        r'x is an external link to "/x" in text\.txt, which cannot be opened from .*put that file there',
    ),
    "a folder": ({"x": ELSEWHERE(".", "/x")}, r'x is an external link to "/x" in \.'),
}


@pytest.mark.parametrize("case", LINKS)
def test_links_that_lead_nowhere(tmp_path: Path, case: str) -> None:
    """The link, its target and the folder that was searched are named."""
    write(tmp_path / "there.h5", **{"group/y": np.arange(3)})
    (tmp_path / "text.txt").write_text("no HDF5 file at all")
    links, text = LINKS[case]
    with pytest.raises(DataError, match=f'a.h5: "x" cannot be reached: /{text}'):
        describe(write(tmp_path / "a.h5", **links), ("x",))


def test_no_such_object_in_a_group(tmp_path: Path) -> None:
    """What there is, is listed with shapes; a part of the way that is a dataset is not a crash."""
    path = write(tmp_path / "a.h5", **{"train/images": np.zeros((3, 2)), "train/labels": np.zeros(3, "u1")})
    with pytest.raises(
        DataError, match=r'no dataset "train/image"; did you mean "train/images"\? .*labels \(3,\) uint8'
    ):
        describe(path, ("train/image",))
    for name in ("train/images/x", "test/images", "/", ".", "train"):
        with pytest.raises(DataError, match=r"a\.h5"):
            describe(path, (name,))
    assert all_rows(path, "/train/labels").tolist() == [0, 0, 0]


def test_a_file_that_this_release_rejects(tmp_path: Path) -> None:
    """What HDF5 says is passed on; here of a superblock of a future version."""
    path = write(tmp_path / "a.h5", x=np.arange(5))
    with path.open("r+b") as raw:
        raw.seek(8)
        raw.write(b"\x63")
    with pytest.raises(DataError, match=r"a\.h5: cannot be opened. HDF5 says: .*superblock"):
        describe(path, ("x",))


SPECIAL: dict[str, Any] = {"pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero")}


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_file(tmp_path: Path, kind: str) -> None:
    """Opening a pipe would wait for ever."""
    SPECIAL[kind](tmp_path / "a.h5")
    with pytest.raises(DataError, match=r"a\.h5: this is no regular file"):
        describe(tmp_path / "a.h5", ("x",))


def test_links_to_files_and_odd_names(tmp_path: Path) -> None:
    """Symbolic links, spaces, percent signs and letters beyond ASCII, in paths and in names of datasets."""
    folder = tmp_path / "ä %d data"
    folder.mkdir()
    path = write(folder / "a b.h5", **{"größe 100%": np.arange(7)})
    (tmp_path / "link.h5").symlink_to(path)
    for each in (path, tmp_path / "link.h5"):
        assert all_rows(each, "größe 100%").tolist() == list(range(7))


def sound(path: Path, **options: Any) -> np.ndarray:
    """A file whose metadata and values all have checksums."""
    values = np.random.default_rng(0).integers(0, 1000, (120, 5))
    with h5py.File(path, "w", libver="latest") as file:
        file.create_dataset("group/x", data=values, fletcher32=True, **{"chunks": (16, 3), **options})
    return values


@pytest.mark.filterwarnings("ignore:.*is read by HDF5, one thread at a time")
@pytest.mark.parametrize(
    "options", [{"compression": "gzip", "shuffle": True}, {}, dict(hdf5plugin.Blosc2())], ids=["gzip", "raw", "slow"]
)
def test_a_bit_that_flipped(tmp_path: Path, options: dict[str, Any]) -> None:
    """Anywhere in the file: the right values, or an error that names it; never other values."""
    path = tmp_path / "a.h5"
    values = sound(path, **options)
    whole = path.read_bytes()
    generator = np.random.default_rng(1)
    refused = 0
    for place in generator.integers(0, len(whole), 150).tolist():
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(generator.integers(8))
        path.write_bytes(damaged)
        try:
            found = all_rows(path, "group/x")
        except DataError as error:
            assert "a.h5" in str(error)
            refused += 1
        else:
            np.testing.assert_array_equal(found, values)
    assert refused > 50


def test_a_file_cut_anywhere(tmp_path: Path) -> None:
    """An error, whatever is missing; also behind a user block."""
    for user_block in (0, 512):
        with h5py.File(tmp_path / "a.h5", "w", userblock_size=user_block) as file:
            file.create_dataset("x", data=np.arange(500), chunks=(64,), compression="gzip")
        whole = (tmp_path / "a.h5").read_bytes()
        for length in np.linspace(0, len(whole) - 1, 40).astype(int).tolist():
            (tmp_path / "a.h5").write_bytes(whole[:length])
            with pytest.raises(
                DataError, match=r"a\.h5: (truncated, \d+ bytes are missing|not an HDF5 file|cannot be opened)"
            ):
                describe(tmp_path / "a.h5", ("x",))


@pytest.mark.filterwarnings("ignore:.*a batch of 10 comes from about")
@pytest.mark.parametrize("change", ["cut", "other", "gone"])
def test_a_file_that_changes_while_it_is_read(tmp_path: Path, change: str) -> None:
    """Values that cannot be decoded any more are an error, and no thread waits."""
    path = tmp_path / "a.h5"
    values = np.random.default_rng(0).random((400, 2000))
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=values, chunks=(10, 2000), compression="gzip", fletcher32=True)
    loader = HDF5Loader(path, ("x",), 10, streams=2, mixing_chunks=1, threads=1)
    next(iter(loader))
    size = path.stat().st_size
    if change == "cut":
        os.truncate(path, size // 8)
    elif change == "other":
        with path.open("r+b") as raw:
            raw.write(np.random.default_rng(1).bytes(size))
    else:
        with path.open("r+b") as raw:
            raw.truncate(0)
        path.unlink()
    with pytest.raises(DataError, match=r'a\.h5: dataset "x", rows \d+ to \d+'):
        for batch in loader:
            np.testing.assert_array_equal(batch.x, values[batch.indices])
    loader.close()


def test_fill_values_never_come_for_data(tmp_path: Path) -> None:
    """Each way in which HDF5 makes up values: not written at all, in part, grown, shrunk and grown."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("never", (10,), "f4")
        file.create_dataset("never, chunked", (10,), "f4", chunks=(4,))
        file.create_dataset("in part", (10, 10), "f4", chunks=(4, 4))[:, :4] = 1
        file.create_dataset("grown", data=np.ones(8), chunks=(4,), maxshape=(None,)).resize((20,))
        shrunk = file.create_dataset("shrunk", data=np.ones(20), chunks=(4,), maxshape=(None,))
        shrunk.resize((4,))
        shrunk.resize((20,))
    for name in ("never", "never, chunked", "in part", "grown", "shrunk"):
        with pytest.raises(DataError, match=f'"{name}": .* (was|were) never written and would read as fill values'):
            describe(tmp_path / "a.h5", (name,))
        with h5py.File(tmp_path / "a.h5") as file:
            expected = file[name][()]
        np.testing.assert_array_equal(all_rows(tmp_path / "a.h5", name, allow_holes=True), expected)


@pytest.mark.parametrize("options", [{"compression": "gzip"}, {"compression": "lzf"}], ids=["gzip", "lzf"])
def test_a_damaged_index_of_chunks(tmp_path: Path, options: dict[str, Any]) -> None:
    """Older files have no checksum of the index; HDF5 takes chunks that it does not find there for holes."""
    path = tmp_path / "a.h5"
    values = np.random.default_rng(0).integers(1, 1000, (120, 5))
    with h5py.File(path, "w", libver="earliest") as file:
        file.create_dataset("x", data=values, chunks=(16, 3), fletcher32=True, **options)
    whole = path.read_bytes()
    start = whole.index(b"TREE\x01")
    refused = 0
    for place in range(start + 6, start + 24 + 17 * 40, 2):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        try:
            found = all_rows(path)
        except DataError as error:
            assert "a.h5" in str(error)
            refused += 1
        else:
            np.testing.assert_array_equal(found, values)
    assert refused > 100
