"""`mpidp data convert` from folders of images, against the pixels that were written."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from data_files import assert_same, error_of, read, run
from numpy.typing import NDArray

Image = pytest.importorskip("PIL.Image")


def save(path: Path, pixels: NDArray[np.generic]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Seven colour images of 4 x 6 pixels in two classes; image n holds n everywhere but for its channel's number."""
    for number in range(7):
        pixels = np.full((4, 6, 3), number, np.uint8) * 10 + np.arange(3, dtype=np.uint8)
        save(tmp_path / "images" / ("dog" if number % 2 else "cat") / f"{number}.png", pixels)
    (tmp_path / "images" / "dog" / ".DS_Store").touch()
    (tmp_path / "images" / "dog" / "notes.txt").touch()
    (tmp_path / "images" / ".cache").mkdir()
    return tmp_path / "images"


def test_classes_are_subfolders(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("convert", folder, tmp_path / "out.h5", "--chunk-rows=2") == 0
    assert "1 files are no images and left out: dog/notes.txt" in capsys.readouterr().err
    found = read(tmp_path / "out.h5")
    assert found["x"].dtype == np.uint8 and found["x"].shape == (7, 3, 4, 6)
    assert found["x"][:, :, 2, 3].tolist() == [[10 * n, 10 * n + 1, 10 * n + 2] for n in (0, 2, 4, 6, 1, 3, 5)]
    assert_same(found["y"], np.array([0, 0, 0, 0, 1, 1, 1]))
    assert found["y_classes"].tolist() == [b"cat", b"dog"]


def test_rows_are_shuffled_with_their_classes(folder: Path, tmp_path: Path) -> None:
    assert run("convert", folder, tmp_path / "out.h5", "--shuffle-rows=5") == 0
    found = read(tmp_path / "out.h5")
    numbers = found["x"][:, 0, 0, 0] // 10
    assert sorted(numbers.tolist()) == list(range(7)) and numbers.tolist() != [0, 2, 4, 6, 1, 3, 5]
    assert found["y"].tolist() == (numbers % 2).tolist()


def test_sizes_and_modes_that_differ_are_brought_together_only_when_asked(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(folder / "dog" / "8.png", np.zeros((5, 6, 3), np.uint8))
    error = error_of(capsys, "convert", folder, tmp_path / "out.h5", code=1)
    assert "cat/0.png is 6x4, dog/8.png is 6x5" in error and "--resize" in error
    save(folder / "dog" / "8.png", np.zeros((4, 6), np.uint8))
    error = error_of(capsys, "convert", folder, tmp_path / "out.h5", code=1)
    assert "cat/0.png has mode RGB, dog/8.png has L" in error and "--mode=L" in error
    assert run("convert", folder, tmp_path / "out.h5", "--mode=L", "--resize=2x3") == 0
    assert read(tmp_path / "out.h5")["x"].shape == (8, 1, 3, 2)


def test_sixteen_bits_stay_sixteen_bits(tmp_path: Path) -> None:
    pixels = np.arange(6, dtype=np.uint16).reshape(2, 3) * 10_000
    save(tmp_path / "images" / "a" / "0.png", pixels)
    assert run("convert", tmp_path / "images", tmp_path / "out.h5") == 0
    assert_same(read(tmp_path / "out.h5")["x"], pixels[None, None])


def test_a_damaged_image_is_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "cat" / "4.png"
    path.write_bytes(path.read_bytes()[:50])
    assert f"{path}: cannot be decoded" in error_of(capsys, "convert", folder, tmp_path / "out.h5", code=1)
    path.write_bytes(b"no image")
    assert f"{path}: cannot be read as an image" in error_of(capsys, "convert", folder, tmp_path / "out.h5", code=1)
    assert not (tmp_path / "out.h5").exists()


def test_an_image_of_endless_size_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Behaviour 56: a file of some bytes may say that it has any number of pixels."""
    path = folder / "cat" / "4.png"
    content = bytearray(path.read_bytes())
    content[16:24] = struct.pack(">II", 2**20, 2**20)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    path.write_bytes(content)
    error = error_of(capsys, "convert", folder, tmp_path / "out.h5", "--resize=6x4", code=1)
    assert error.startswith(f"mpidp: error: {path}: Image size") and error.count("\n") == 1


def test_no_image_is_a_program(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """PostScript is decoded by Ghostscript, so it is no image here, whatever its name."""
    (folder / "cat" / "8.eps").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 6 4\nshowpage\n")
    assert run("convert", folder, tmp_path / "out.h5") == 0
    assert "2 files are no images and left out: cat/8.eps, dog/notes.txt" in capsys.readouterr().err
    (folder / "cat" / "8.eps").rename(folder / "cat" / "8.png")
    error = error_of(capsys, "convert", folder, tmp_path / "other.h5", code=1)
    assert f"{folder / 'cat/8.png'}: cannot be read as an image" in error


def test_a_folder_without_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "images" / "empty").mkdir(parents=True)
    error = error_of(capsys, "convert", tmp_path / "images", tmp_path / "out.h5", code=1)
    assert "no images in its subfolders (empty)" in error
    assert "expected WIDTHxHEIGHT" in error_of(
        capsys, "convert", tmp_path / "images", tmp_path / "out.h5", "--resize=20", code=2
    )


def test_without_pillow_it_says_what_to_install(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    error = error_of(capsys, "convert", folder, tmp_path / "out.h5", code=2)
    assert "pip install Pillow" in error
