"""Write scikit-learn's copy of the UCI digits as `data/digits.h5`.

Run from the top of the repository: python data/make_digits.py [OUT.h5]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import h5py
import numpy as np
from sklearn.datasets import load_digits

CHUNK_ROWS = 64
DARKEST = 16
ATTRIBUTES = {
    "title": "Optical Recognition of Handwritten Digits: 1,797 images of 8x8 pixels",
    "source": "E. Alpaydin and C. Kaynak (1998), UCI Machine Learning Repository, "
    "https://archive.ics.uci.edu/dataset/80; the test set, as scikit-learn's load_digits distributes it",
    "licence": "CC BY 4.0, as UCI states it; https://creativecommons.org/licenses/by/4.0/",
    "fields": "x: float32 (sample, channel, row, column), ink from 0 to 1; y: int64, the digit",
    "made_by": "data/make_digits.py",
}


def write_digits(path: Path) -> None:
    """Write the digits in the order of the source, compressed; a file of that name is replaced."""
    pixels, digit = load_digits(return_X_y=True)
    images = (pixels / DARKEST).astype(np.float32).reshape(-1, 1, 8, 8)
    layout = {"compression": "gzip", "compression_opts": 9, "shuffle": True}
    with h5py.File(path, "w") as file:
        file.attrs.update(ATTRIBUTES)
        file.create_dataset("x", data=images, chunks=(CHUNK_ROWS, 1, 8, 8), **layout)
        file.create_dataset("y", data=digit.astype(np.int64), chunks=(CHUNK_ROWS,), **layout)


def main(arguments: list[str] | None = None) -> None:
    """Command line: where to write."""
    parser = argparse.ArgumentParser(description="Write scikit-learn's handwritten digits as HDF5.")
    parser.add_argument("out", nargs="?", type=Path, default=Path(__file__).with_name("digits.h5"))
    out: Path = parser.parse_args(arguments).out
    write_digits(out)
    print(f"{out}: {out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
