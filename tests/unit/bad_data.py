"""HDF5 files with known faults, for the tests of `mpidp data` on one rank and on several."""

from pathlib import Path

import h5py
import numpy as np

ROWS, CHUNK_ROWS = 1000, 50


def write_sound(path: Path) -> Path:
    """Several layouts, types and filters, and nothing wrong."""
    random = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        x = random.normal(size=(ROWS, 6)).astype("f4")
        file.create_dataset("x", data=x, chunks=(CHUNK_ROWS, 4), compression="gzip", fletcher32=True)
        file["group/contiguous"] = random.integers(0, 9, ROWS)
        file["words"], file["single"], file["nothing"] = ["a", "b"], 1.5, h5py.Empty("f4")
        file["compound"] = np.zeros(10, [("a", "f4"), ("b", "u8", 2)])
        file["no rows"] = np.zeros((0, 3))
        file["link"] = h5py.SoftLink("/x")
    return path


def write_one_bad_object(path: Path) -> Path:
    """Two datasets, "good" and "bad", of which the second cannot be opened."""
    with h5py.File(path, "w", libver="earliest") as file:
        file["good"], file["bad"] = np.arange(20.0), np.arange(20, dtype="f4")
        start = h5py.h5o.get_info(file["bad"].id).addr
    content = bytearray(path.read_bytes())
    content[start] ^= 4  # the version of its header
    path.write_bytes(content)
    return path


def damage(path: Path, chunks: list[int]) -> Path:
    """Change bytes in the middle of these chunks of x, by their numbers."""
    with h5py.File(path) as file:
        infos = [file["x"].id.get_chunk_info(chunk) for chunk in chunks]
    with open(path, "r+b") as raw:
        for info in infos:
            raw.seek(info.byte_offset + info.size // 2)
            raw.write(b"\xff\x00damage")
    return path


def write_bad_values(path: Path) -> Path:
    """Three values of x that are not finite, one in a member of a compound; two too large for int64; 12 chunks lost."""
    with h5py.File(path, "w") as file:
        x = np.ones((ROWS, 6), "f4")
        x[[400, 77], [5, 2]], x[901, 0] = np.nan, -np.inf
        file.create_dataset("x", data=x, chunks=(CHUNK_ROWS, 4))
        compound = np.zeros(10, [("a", "f8", 3), ("b", "u8")])
        compound["a"][7, 1], compound["b"][[3, 9]] = np.nan, 2**63
        file["compound"] = compound
        holes = file.create_dataset("holes", (ROWS, 2), "i4", chunks=(CHUNK_ROWS, 2))
        holes[: 5 * CHUNK_ROWS] = holes[17 * CHUNK_ROWS :] = 1
        file.create_dataset("unwritten", (4,), "i4")
    return path


def write_wild_shape(path: Path) -> Path:
    """Write a file whose dataset says that it has 2^40 times the rows that it has."""
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.zeros((77, 3), "u1"), chunks=(7, 3), maxshape=(None, 3))
    lengths, wild = (np.array(shape, "<u8").tobytes() for shape in ((77, 3), (77 << 40, 3)))
    path.write_bytes(path.read_bytes().replace(lengths, wild, 1))
    return path
