"""What a resume takes for the same data: files that were moved are, files that hold something else are not."""

import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_runs import records, small_run

from mpidp.errors import DataError
from mpidp.hdf5.field import FieldSpec
from mpidp.hdf5.files.fingerprint import _PLACE_BYTES, _window
from mpidp.hdf5.loader import HDF5Loader, Mode

ROWS = 90
X = np.random.default_rng(0).standard_normal((ROWS, 5))


def write(path: Path, x: Any = X, chunk: int | None = 9, dtype: str = "f4", **options: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        chunks = None if chunk is None else (chunk, x.shape[1])
        file.create_dataset("x", data=np.asarray(x), chunks=chunks, dtype=dtype, **options)
        file["y"] = np.arange(len(x))
    return path


def make(paths: Sequence[Path] | Path, **options: Any) -> HDF5Loader:
    return HDF5Loader(paths, ("x", "y"), **{"global_batch": 20, "seed": 3, "streams": 3, "mixing_chunks": 2} | options)


def state_at(paths: Sequence[Path] | Path, steps: int = 2, **options: Any) -> tuple[dict[str, Any], list[int]]:
    """The state after some steps, and the rows that they were made of."""
    with closing(make(paths, **options)) as loader:
        batches = iter(loader)
        seen = [row for _ in range(steps) for row in next(batches).indices.tolist()]
        return loader.state_dict(), seen


@pytest.mark.filterwarnings("ignore:mode=.stage. copies to")
@pytest.mark.parametrize("mode", ["stream", "node", "store", "stage"])
@pytest.mark.parametrize("shuffle", ["streams", "full", "none"])
def test_files_that_were_moved_are_the_same(tmp_path: Path, shuffle: str, mode: Mode) -> None:
    """Behaviours 25, 53: whatever they are called now, exactly the unseen samples follow."""
    before = [write(tmp_path / "before/a.h5"), write(tmp_path / "before/b.h5", X[:40] + 1)]
    state, seen = state_at(before, shuffle=shuffle, mode=mode, stage_folder=tmp_path)
    (tmp_path / "now").mkdir()
    now = [Path(shutil.move(path, tmp_path / "now" / f"renamed_{path.name}")) for path in before]
    with closing(make(now, shuffle=shuffle, mode=mode, stage_folder=tmp_path)) as loader:
        loader.load_state_dict(state)
        seen += [row for batch in loader for row in batch.indices.tolist()]
    assert sorted(seen) == list(range(ROWS + 40))


CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "rechunked": (lambda folder: write(folder / "a.h5", chunk=10), r"a\.h5 \(file 1 of 2\) has other chunks: 9 rows"),
    "not chunked": (
        lambda folder: write(folder / "b.h5", X[:40], chunk=None),
        r"b\.h5 \(file 2 of 2\) has other chunks",
    ),
    "longer": (lambda folder: write(folder / "b.h5", X[:41]), r"b\.h5 \(file 2 of 2\) had 40 rows, and now has 41"),
    "of another dtype": (
        lambda folder: write(folder / "a.h5", dtype="f8"),
        'had dtype float32 in field "x", .* float64',
    ),
    "of another shape": (lambda folder: write(folder / "a.h5", X[:, :4]), r'had shape \[5\] in field "x", .*\[4\]'),
    "new at the start": (lambda folder: write(folder / "a.h5", _with(0)), 'has other values in field "x" than before'),
    "new in the middle": (lambda folder: write(folder / "a.h5", _with(44)), 'has other values in field "x"'),
    "new at the end": (
        lambda folder: write(folder / "b.h5", _with(39)[:40]),
        r"b\.h5 \(file 2 of 2\) has other values",
    ),
    "swapped": (lambda folder: _swap(folder / "a.h5", folder / "b.h5"), "b.h5.* had 40 rows"),
}


def _with(row: int) -> Any:
    values = X.copy()
    values[row, 3] += 1
    return values


def _swap(a: Path, b: Path) -> None:
    """Each under the other's name: the first is longer, so that only the order tells."""
    c = a.with_name("c.h5")
    a.rename(c)
    b.rename(a)
    c.rename(b)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("shuffle", ["streams", "full", "none"])
def test_what_changed_is_named(tmp_path: Path, shuffle: str, change: str, caplog: pytest.LogCaptureFixture) -> None:
    """Behaviour 53; accepted on purpose, the epoch begins anew, with every sample once, and that is said."""
    paths = [write(tmp_path / "a.h5"), write(tmp_path / "b.h5", X[:40])]
    state, _ = state_at(paths, shuffle=shuffle)
    changed, text = CHANGES[change]
    if change == "of another shape":
        write(tmp_path / "b.h5", X[:40, :4])
    if change == "of another dtype":
        write(tmp_path / "b.h5", X[:40], dtype="f8")
    changed(tmp_path)
    with closing(make(paths, shuffle=shuffle)) as loader:
        with pytest.raises(DataError, match=text if change != "swapped" else "in another order; file 1 was .*a.h5"):
            loader.load_state_dict(state)
        assert (loader.epoch, loader.position) == (0, 0)
        assert not caplog.records
        with caplog.at_level(logging.WARNING, "mpidp"):
            loader.load_state_dict({**state, "epoch": 4}, accept_changed=True)
        (record,) = caplog.records
        assert "the epoch begins anew" in record.getMessage()
        assert (loader.epoch, loader.position) == (4, 0)
        rows = [row for batch in loader for row in batch.indices.tolist()]
        assert sorted(rows) == list(range(loader.num_samples))


def test_another_order_and_other_files(tmp_path: Path) -> None:
    """Equal lengths: nothing but their values tells files apart."""
    a, b, c = (write(tmp_path / f"{name}.h5", X + number) for number, name in enumerate("abc"))
    state, _ = state_at([a, b])
    for paths, text in (
        ([b, a], r"another order; file 1 was .*a\.h5, and now is .*b\.h5"),
        ([a, c], r'c\.h5 \(file 2 of 2, where .*b\.h5 was\) has other values in field "x"'),
        ([a, b, c], "there were 2 files, and now there are 3"),
        ([a], "there were 2 files, and now there is 1"),
    ):
        with closing(make(paths)) as loader, pytest.raises(DataError, match=text):
            loader.load_state_dict(state)


def test_other_fields_and_states_of_old(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5")
    state, _ = state_at(path)
    with closing(HDF5Loader(path, ("x",), 20)) as loader:
        with pytest.raises(DataError, match="was read for the fields x, y, and now is for x"):
            loader.load_state_dict(state)
        del state["files"]
        with pytest.raises(DataError, match="the state lacks files; it is not one of a loader of this version"):
            loader.load_state_dict(state)


def test_a_split_does_not_move(tmp_path: Path) -> None:
    """Behaviour 53: rows that were held out are not trained on after a resume, or that is refused."""
    path = write(tmp_path / "a.h5")
    state, _ = state_at(path, split=("train", 0.3))
    write(path, chunk=11)
    with closing(make(path, split=("train", 0.3))) as loader, pytest.raises(DataError, match="other chunks"):
        loader.load_state_dict(state)


def test_other_filters_are_no_change(tmp_path: Path) -> None:
    """Values are compared, not how they are stored."""
    path = write(tmp_path / "a.h5", compression="gzip", shuffle=True)
    state, seen = state_at(path)
    write(path, compression="lzf")
    with closing(make(path)) as loader:
        loader.load_state_dict(state)
        seen += [row for batch in loader for row in batch.indices.tolist()]
    assert sorted(seen) == list(range(ROWS))


@pytest.mark.filterwarnings("ignore:.*is read by HDF5, one thread at a time")
def test_axes_and_texts(tmp_path: Path) -> None:
    """Samples along the last axis, and values that a function decodes."""
    specs = [FieldSpec("x", axis=-1), FieldSpec("name", decode=lambda text: np.char.str_len(text))]

    def write_both(x: Any, names: list[bytes]) -> None:
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file["x"], file["name"] = x, np.array(names)

    values, names = np.arange(24.0).reshape(2, 2, 6), [b"a", b"bb", b"c", b"d", b"ee", b"f"]
    write_both(values, names)
    with closing(HDF5Loader(tmp_path / "a.h5", specs, 2)) as loader:
        state = loader.state_dict()
        loader.load_state_dict(state)
    for x, texts, field in ((values + 1, names, "x"), (values, [b"z", *names[1:]], "name")):
        write_both(x, texts)
        with (
            closing(HDF5Loader(tmp_path / "a.h5", specs, 2)) as loader,
            pytest.raises(DataError, match=f'field "{field}"'),
        ):
            loader.load_state_dict(state)


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=5), st.data(), st.integers(0, 64))
def test_what_is_read_is_little(shape: list[int], data: st.DataObject, item_bytes: int) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    counts = _window(shape, axis, item_bytes)
    assert all(1 <= count <= length for count, length in zip(counts, shape, strict=True))
    assert np.prod(counts, dtype=object) * item_bytes <= _PLACE_BYTES


def test_a_run_is_resumed_on_changed_data_only_on_purpose(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Behaviour 53, for `mpidp train --resume`: refused before anything is written, or the epoch is trained anew."""
    folder = small_run(tmp_path, checkpoint__every_steps=3)  # 5 steps an epoch
    shutil.rmtree(folder / "checkpoints/step_00000010")
    shutil.rmtree(folder / "checkpoints/step_00000009", ignore_errors=True)
    with h5py.File(tmp_path / "data.h5", "r+") as file:
        values = file["x"][:]
        del file["x"]
        file.create_dataset("x", data=values, chunks=(7, 4))
    before = (folder / "env.json").read_bytes()
    with pytest.raises(DataError, match=r"data\.h5 \(file 1 of 1\) has other chunks"):
        small_run(tmp_path, folder)
    assert (folder / "env.json").read_bytes() == before
    small_run(tmp_path, folder, data__accept_changed=True)
    assert sum("the epoch begins anew" in record.getMessage() for record in caplog.records) == 1
    assert [(record["epoch"], record["step"]) for record in records(folder, "validation")][-1] == (1, 11)
