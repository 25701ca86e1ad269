"""A folder of images, with a subfolder for each class, as the source of a conversion: x, the pixels, and y, the class.

Needs Pillow (extra `images`). Headers are read first, so that sizes that do not agree are known at once.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidp.errors import ConfigError, DataError
from mpidp.hdf5.plan import IntArray
from mpidp.tools.data.options import ConvertOptions
from mpidp.tools.data.source import Source, SourceField, Values

# Pillow's name of how pixels are kept -> type of a value, values of a pixel.
MODES = {"L": ("u1", 1), "RGB": ("u1", 3), "RGBA": ("u1", 4), "I;16": ("u2", 1), "F": ("f4", 1)}
# Of the formats that Pillow knows, those that images for training come in; decoding PostScript would run a program.
FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
_MOST_NAMED = 3


class ImageSource(Source):
    """Images of one size and mode, in the order of class and file name."""

    def __init__(self, folder: str, options: ConvertOptions) -> None:
        _pillow()
        self._folder = Path(folder)
        wanted_size = _size(options.resize)
        self._remarks: list[str] = []
        self._classes = sorted(path.name for path in self._folder.iterdir() if path.is_dir() and not _is_hidden(path))
        self._files, labels = self._list()
        self._labels = np.array(labels, np.int64)
        self._size, self._mode = self._survey(wanted_size, options.mode)

    @property
    def fields(self) -> tuple[SourceField, ...]:
        """x, of (channels, height, width), and y."""
        code, channels = MODES[self._mode]
        width, height = self._size
        x = SourceField("x", len(self._files), (channels, height, width), np.dtype(code))
        return x, SourceField("y", len(self._files), (), np.dtype(np.int64))

    @property
    def texts(self) -> Mapping[str, Sequence[str]]:
        """The names of the classes."""
        return {"y_classes": self._classes}

    @property
    def remarks(self) -> Sequence[str]:
        """Files that are no images."""
        return self._remarks

    def take(self, names: Sequence[str], rows: IntArray) -> Values:
        """Return pixels and classes."""
        values: Values = {"y": self._labels[rows]} if "y" in names else {}
        if "x" in names:
            field = self.fields[0]
            x = np.empty((len(rows), *field.shape), field.dtype)
            for place, row in enumerate(rows.tolist()):
                x[place] = self._pixels(self._folder / self._files[row])
            values["x"] = x
        return values

    def _list(self) -> tuple[list[str], list[int]]:
        suffixes = {suffix for suffix, name in _pillow().registered_extensions().items() if name in FORMATS}
        files: list[str] = []
        labels: list[int] = []
        others: list[str] = []
        for label, name in enumerate(self._classes):
            for path in sorted((self._folder / name).rglob("*")):
                if path.is_file() and not _is_hidden(path):
                    is_image = path.suffix.lower() in suffixes
                    (files if is_image else others).append(str(path.relative_to(self._folder)))
                    labels += [label] * is_image
        if not files:
            raise DataError(
                f"{self._folder}: no images in its subfolders ({', '.join(self._classes) or 'there are none'}); "
                "expected a subfolder for each class, with the images of that class in it"
            )
        if others:
            more = ", ..." if len(others) > _MOST_NAMED else ""
            self._remarks.append(f"{len(others)} files are no images and left out: {', '.join(others[:3])}{more}")
        return files, labels

    def _survey(self, wanted_size: tuple[int, int] | None, wanted_mode: str | None) -> tuple[tuple[int, int], str]:
        """Return the size (width, height) and mode that all images have, or are brought to."""
        size, mode = wanted_size, wanted_mode
        first = ""
        for name in self._files:
            with self._image(self._folder / name) as image:
                if not first:
                    first = name
                    size, mode = size or image.size, mode or image.mode
                if wanted_size is None and image.size != size:
                    raise DataError(
                        f"{self._folder}: {first} is {_size_text(size)}, {name} is {_size_text(image.size)}; all must "
                        "have one size, or be brought to it by --resize=WIDTHxHEIGHT"
                    )
                if wanted_mode is None and image.mode != mode:
                    raise DataError(
                        f"{self._folder}: {first} has mode {mode}, {name} has {image.mode}; all must have one, or be "
                        "brought to it by --mode=L (grey) or --mode=RGB"
                    )
        assert size is not None and mode is not None
        if mode not in MODES:
            raise DataError(f"{self._folder}: images have mode {mode}; give --mode=L (grey), --mode=RGB or --mode=RGBA")
        return size, mode

    def _pixels(self, path: Path) -> npt.NDArray[Any]:
        """Return (channels, height, width)."""
        with self._image(path) as image:
            try:
                image.load()  # what was opened is not yet decoded
                converted = image if image.mode == self._mode else image.convert(self._mode)
                sized = converted if converted.size == self._size else converted.resize(self._size, _pillow().BILINEAR)
            except (OSError, ValueError, SyntaxError, EOFError) as error:
                raise DataError(f"{path}: cannot be decoded: {error}; repair or remove it") from error
            pixels = np.asarray(sized)
        return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)

    @contextmanager
    def _image(self, path: Path) -> Iterator[Any]:
        try:
            image = _pillow().open(path, formats=FORMATS)
        except (OSError, ValueError, SyntaxError) as error:
            raise DataError(f"{path}: cannot be read as an image: {error}; repair or remove it") from error
        except _pillow().DecompressionBombError as error:
            raise DataError(
                f"{path}: {error}; cut it into smaller images, or remove it if it is not meant to be so large"
            ) from error
        with image:
            yield image


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError("images need the package Pillow: pip install Pillow") from error
    Image.init()
    return Image


def _is_hidden(path: Path) -> bool:
    return path.name.startswith(".")


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise ConfigError(f"--resize={text}; expected WIDTHxHEIGHT, such as 224x224.")
    return int(found[1]), int(found[2])


def _size_text(size: tuple[int, int] | None) -> str:
    assert size is not None
    return f"{size[0]}x{size[1]}"
