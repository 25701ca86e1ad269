"""Write UTF-8 text files as one HDF5 file of overlapping windows of bytes.

Run: python data/make_text.py TEXT.txt [MORE.txt ...] OUT.h5 [--window 129] [--validation-fraction 0.1]

A window of 129 bytes gives a language model 128 inputs and 128 targets. The next window starts at the last byte
of this one, so every byte but the first is a target exactly once; at most 127 bytes at the end are left out.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

CHUNK_ROWS = 64


def read_text(paths: list[Path]) -> NDArray[np.uint8]:
    """The bytes of all files, one after the other; each must be UTF-8."""
    for path in paths:
        try:
            path.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 text: {error}. Convert it first, with iconv say.") from error
    return np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8)


def windows(text: NDArray[np.uint8], length: int) -> NDArray[np.uint8]:
    """Windows (N, length) of `text` that share one byte with their neighbours."""
    if length < 2:
        raise ValueError(f"a window of {length} has no next byte to predict: --window must be at least 2")
    if len(text) < length:
        raise ValueError(f"the text has {len(text)} bytes, which is less than one window of {length}")
    return np.lib.stride_tricks.sliding_window_view(text, length)[:: length - 1]


def write(path: Path, tokens: NDArray[np.uint8], sources: list[Path]) -> None:
    """Write the windows to `path`, which appears only when it is complete."""
    unfinished = path.with_name(f"{path.name}.part")
    with h5py.File(unfinished, "w") as file:
        file.attrs.update(
            title="Text as windows of bytes that overlap by one",
            source=", ".join(source.name for source in sources),
            licence="that of the text",
            fields="tokens: uint8 (sample, time), UTF-8 bytes",
            made_by="data/make_text.py",
        )
        chunks = (min(CHUNK_ROWS, len(tokens)), tokens.shape[1])
        file.create_dataset("tokens", data=tokens, chunks=chunks, compression="gzip", shuffle=True)
    os.replace(unfinished, path)


def make(texts: list[Path], out: Path, window: int, validation_fraction: float) -> list[Path]:
    """Write `out`, or with a fraction > 0 `out` and `*_validation.h5` (the end of the text); what was written."""
    if not 0 <= validation_fraction < 1:
        raise ValueError(f"--validation-fraction is {validation_fraction}: it must be in [0, 1)")
    tokens = windows(read_text(texts), window)
    held_out = round(validation_fraction * len(tokens))
    if validation_fraction > 0 and not 0 < held_out < len(tokens):
        raise ValueError(f"{len(tokens)} windows do not split by {validation_fraction}: give more text")
    write(out, tokens[: len(tokens) - held_out], texts)
    if not held_out:
        return [out]
    validation = out.with_name(f"{out.stem}_validation{out.suffix}")
    write(validation, tokens[-held_out:], texts)
    return [out, validation]


def main(arguments: list[str] | None = None) -> int:
    """Command line: texts, where to write; 2 when the input cannot be used."""
    parser = argparse.ArgumentParser(description="Cut UTF-8 text into windows of bytes, as HDF5.")
    parser.add_argument("text", nargs="+", type=Path, help="UTF-8 files, in order")
    parser.add_argument("out", type=Path, help="HDF5 file to write")
    parser.add_argument("--window", type=int, default=129, help="bytes of a window: context + 1")
    parser.add_argument("--validation-fraction", type=float, default=0.0, help="write this share apart")
    options = parser.parse_args(arguments)
    try:
        written = make(options.text, options.out, options.window, options.validation_fraction)
    except (ValueError, OSError) as error:
        print(f"make_text: error: {error}", file=sys.stderr)
        return 2
    for path in written:
        with h5py.File(path) as file:
            print(f"{path}: {file['tokens'].shape[0]:,} windows, {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
