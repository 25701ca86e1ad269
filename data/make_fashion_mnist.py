"""Write the four IDX files of Fashion-MNIST as two HDF5 files, for training and for test.

Run from the top of the repository: python data/make_fashion_mnist.py [FOLDER] [--out data]
The folder's default is where Debian's package dataset-fashion-mnist puts the files. They may be gzipped.
"""

from __future__ import annotations

import argparse
import gzip
import os
import sys
import zlib
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
CHUNK_ROWS = 256
UNSIGNED_BYTE = 8  # the code of the IDX format for the type of the values
ATTRIBUTES = {
    "title": "Fashion-MNIST: images of clothes, 28x28 grey pixels, 10 classes",
    "source": "H. Xiao, K. Rasul and R. Vollgraf (2017), Fashion-MNIST, Zalando SE",
    "licence": "MIT",
    "fields": "x: uint8 (sample, row, column), 0 to 255; y: uint8, the class from 0 to 9",
    "made_by": "data/make_fashion_mnist.py",
}


def find(folder: Path, name: str) -> Path:
    """The path of `name` in `folder`, plain or gzipped."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise ValueError(
        f"{folder}: neither {name} nor {name}.gz is there. "
        "Install Debian's package dataset-fashion-mnist, or name the folder that holds the four IDX files."
    )


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """The array of an IDX file of unsigned bytes: magic number, sizes (32-bit, big-endian), values."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read: {error}. Is the file complete?") from error
    magic = bytes((0, 0, UNSIGNED_BYTE, dimensions))
    header = 4 * (1 + dimensions)
    if raw[:4] != magic or len(raw) < header:
        raise ValueError(
            f"{path}: begins with {raw[:4].hex()!r} and not with {magic.hex()!r}: "
            f"not an IDX file of bytes with {dimensions} dimension(s)"
        )
    shape = tuple(int(size) for size in np.frombuffer(raw, ">u4", dimensions, offset=4))
    values = np.frombuffer(raw, np.uint8, offset=header)
    expected = int(np.prod(shape))
    if len(values) != expected:
        raise ValueError(f"{path}: holds {len(values):,} values, its header says {expected:,}: truncated?")
    return values.reshape(shape)


def convert(folder: Path, prefix: str, out: Path) -> None:
    """Write one part (`prefix` is "train" or "t10k") to `out`, which appears only when it is complete."""
    images_path = find(folder, f"{prefix}-images-idx3-ubyte")
    labels_path = find(folder, f"{prefix}-labels-idx1-ubyte")
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if len(images) != len(labels):
        raise ValueError(f"{images_path} has {len(images)} images, {labels_path} has {len(labels)} labels")
    rows = min(CHUNK_ROWS, len(images))
    layout = {"compression": "gzip", "compression_opts": 4, "shuffle": True}
    unfinished = out.with_name(f"{out.name}.part")
    with h5py.File(unfinished, "w") as file:
        file.attrs.update(ATTRIBUTES)
        file.create_dataset("x", data=images, chunks=(rows, *images.shape[1:]), **layout)
        file.create_dataset("y", data=labels, chunks=(rows,), **layout)
    os.replace(unfinished, out)


def main(arguments: list[str] | None = None) -> int:
    """Command line: which folder to read, where to write; 2 when the input cannot be used."""
    parser = argparse.ArgumentParser(description="Convert Fashion-MNIST from IDX files to HDF5.")
    parser.add_argument("folder", nargs="?", type=Path, default=DEBIAN_FOLDER)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write to")
    options = parser.parse_args(arguments)
    for prefix, part in (("train", "train"), ("t10k", "test")):
        path = options.out / f"fashion_mnist_{part}.h5"
        try:
            convert(options.folder, prefix, path)
        except (ValueError, OSError) as error:
            print(f"make_fashion_mnist: error: {error}", file=sys.stderr)
            return 2
        print(f"{path}: {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
