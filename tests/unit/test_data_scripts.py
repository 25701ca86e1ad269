"""The scripts of data/: what they write, and what they say about input that cannot be used."""

import gzip
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

DATA = Path(__file__).parents[2] / "data"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DATA / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_digits, make_fashion_mnist, make_text = map(script, ("make_digits", "make_fashion_mnist", "make_text"))


def idx(array: NDArray[np.uint8]) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + b"".join(size.to_bytes(4, "big") for size in array.shape) + array.tobytes()


@pytest.fixture
def idx_folder(tmp_path: Path) -> Path:
    """A small Fashion-MNIST: training files gzipped, test files not."""
    random = np.random.default_rng(0)
    for prefix, rows in (("train", 300), ("t10k", 20)):
        images = random.integers(0, 256, (rows, 28, 28), dtype=np.uint8)
        labels = random.integers(0, 10, rows, dtype=np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            path = tmp_path / f"{prefix}-{kind}-ubyte"
            if prefix == "train":
                path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(idx(array)))
            else:
                path.write_bytes(idx(array))
    return tmp_path


def test_digits_in_the_repository_are_what_the_script_makes(tmp_path: Path) -> None:
    make_digits.main([str(tmp_path / "digits.h5")])
    with h5py.File(DATA / "digits.h5") as kept, h5py.File(tmp_path / "digits.h5") as made:
        assert dict(kept.attrs) == dict(made.attrs)
        for field in ("x", "y"):
            assert np.array_equal(kept[field], made[field])
            assert kept[field].dtype == made[field].dtype and kept[field].chunks == made[field].chunks


def test_digits_file_is_small_and_as_described() -> None:
    path = DATA / "digits.h5"
    assert path.stat().st_size < 200_000
    with h5py.File(path) as file:
        images, digits = file["x"], file["y"]
        assert (images.shape, images.dtype, images.chunks) == ((1797, 1, 8, 8), np.float32, (64, 1, 8, 8))
        assert (digits.shape, digits.dtype, digits.chunks) == ((1797,), np.int64, (64,))
        assert all(field.compression == "gzip" and field.shuffle for field in (images, digits))
        assert (images[:].min(), images[:].max()) == (0, 1)
        assert set(digits[:]) == set(range(10))
        assert {"title", "source", "licence"} <= set(file.attrs)


def test_fashion_mnist_round_trip(idx_folder: Path, tmp_path: Path) -> None:
    assert make_fashion_mnist.main([str(idx_folder), "--out", str(tmp_path)]) == 0
    raw = gzip.decompress((idx_folder / "train-images-idx3-ubyte.gz").read_bytes())
    with h5py.File(tmp_path / "fashion_mnist_train.h5") as file:
        images, labels = file["x"], file["y"]
        assert (images.shape, images.dtype, images.chunks) == ((300, 28, 28), np.uint8, (256, 28, 28))
        assert (labels.shape, labels.dtype, labels.chunks) == ((300,), np.uint8, (256,))
        assert images.compression == "gzip" and images.shuffle
        assert images[:].tobytes() == raw[16:]
    with h5py.File(tmp_path / "fashion_mnist_test.h5") as file:
        assert file["y"][:].tobytes() == (idx_folder / "t10k-labels-idx1-ubyte").read_bytes()[8:]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t10k-labels-idx1-ubyte", None, "neither t10k-labels-idx1-ubyte nor t10k-labels-idx1-ubyte.gz is there"),
        ("t10k-labels-idx1-ubyte", b"\x89HDF\r\n\x1a\n", "begins with '89484446' and not with '00000801'"),
        ("t10k-labels-idx1-ubyte", b"\x00\x00\x08\x01", "not an IDX file"),
        ("t10k-labels-idx1-ubyte", idx(np.zeros(20, np.uint8))[:-3], "holds 17 values, its header says 20"),
        ("t10k-labels-idx1-ubyte", idx(np.zeros(19, np.uint8)), "20 images, .* 19 labels"),
        ("train-labels-idx1-ubyte.gz", gzip.compress(idx(np.zeros(300, np.uint8)))[:-9], "cannot be read"),
        ("train-labels-idx1-ubyte.gz", b"not gzip", "cannot be read"),
    ],
    ids=["missing", "magic", "header", "truncated", "lengths", "gzip-truncated", "not-gzip"],
)
def test_fashion_mnist_names_the_file_that_is_wrong(
    idx_folder: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | None, message: str
) -> None:
    if content is None:
        (idx_folder / name).unlink()
    else:
        (idx_folder / name).write_bytes(content)
    out = idx_folder / "out"
    out.mkdir()
    assert make_fashion_mnist.main([str(idx_folder), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert str(idx_folder) in error and name.removesuffix(".gz") in error
    assert re.search(message, error)
    broken = "train" if name.startswith("train") else "test"
    assert not (out / f"fashion_mnist_{broken}.h5").exists()


@given(length=st.integers(2, 300), window=st.integers(2, 40))
def test_every_byte_but_the_first_is_a_target_once(length: int, window: int) -> None:
    text = np.arange(length, dtype=np.int64)
    if length < window:
        with pytest.raises(ValueError, match="less than one window"):
            make_text.windows(text, window)
        return
    targets = make_text.windows(text, window)[:, 1:].ravel()
    assert targets.tolist() == list(range(1, 1 + len(targets)))
    assert length - 1 - len(targets) < window - 1


def test_text_of_several_files_is_one_text(tmp_path: Path) -> None:
    first, second, out = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "text.h5"
    first.write_text("größer ", encoding="utf-8")
    second.write_text("als zuvor", encoding="utf-8")
    assert make_text.main([str(first), str(second), str(out), "--window", "5"]) == 0
    with h5py.File(out) as file:
        tokens = file["tokens"][:]
        assert tokens.dtype == np.uint8
        assert tokens.tobytes()[:5] == "größer".encode()[:5]
        assert file.attrs["source"] == "a.txt, b.txt"
    assert bytes(tokens[:, 1:].ravel()) == "größer als zuvor".encode()[1 : 1 + 4 * len(tokens)]


def test_text_holds_out_its_end(tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "text.h5"
    text.write_bytes(bytes(range(101)))
    assert make_text.main([str(text), str(out), "--window", "11", "--validation-fraction", "0.2"]) == 0
    with h5py.File(out) as train, h5py.File(tmp_path / "text_validation.h5") as validation:
        assert (len(train["tokens"]), len(validation["tokens"])) == (8, 2)
        assert validation["tokens"][0, 0] == train["tokens"][-1, -1]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"\xff\xfe", [], "not UTF-8"),
        (b"short", [], "less than one window of 129"),
        (b"long enough", ["--window", "1"], "at least 2"),
        (b"long enough", ["--window", "3", "--validation-fraction", "1"], r"must be in \[0, 1\)"),
        (b"long enough", ["--window", "3", "--validation-fraction", "0.01"], "do not split"),
        (None, [], "No such file"),
    ],
)
def test_text_that_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, options: list[str], message: str
) -> None:
    if content is not None:
        (tmp_path / "text.txt").write_bytes(content)
    assert make_text.main([str(tmp_path / "text.txt"), str(tmp_path / "out.h5"), *options]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.glob("*.h5*"))
