"""Capabilities of the installed HDF5 library; `main` is run as a child process.

In a child, since an h5py that was built with MPI starts MPI when it is imported.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any

# Registered numbers of filters, https://github.com/HDFGroup/hdf5_plugins: those that files from others often have.
FILTERS = {"deflate": 1, "shuffle": 2, "fletcher32": 3, "szip": 4, "lzf": 32000, "blosc": 32001, "zstd": 32015}


@dataclass(frozen=True)
class HDF5Library:
    """The HDF5 library behind h5py.

    Attributes:
        h5py, hdf5: versions.
        has_mpi: whether h5py was built with MPI.
        filters: for each known filter, whether this HDF5 can undo it.
        packages: for each package with more filters, whether it is installed.
        file_error: what HDF5 said when it opened the file; "" if all went well or no file was given.
    """

    h5py: str
    hdf5: str
    has_mpi: bool
    filters: dict[str, bool] = field(default_factory=dict)
    packages: dict[str, bool] = field(default_factory=dict)
    file_error: str = ""


def describe(path: str = "") -> HDF5Library:
    """Ask h5py, and let it open a file where one is given; read-only, without a lock."""
    import h5py

    packages = {name: find_spec(name) is not None for name in ("hdf5plugin", "imagecodecs")}
    if packages["hdf5plugin"]:
        import hdf5plugin  # noqa: F401  registers its filters
    return HDF5Library(
        h5py.version.version,
        h5py.version.hdf5_version,
        bool(h5py.get_config().mpi),
        {name: bool(h5py.h5z.filter_avail(number)) for name, number in FILTERS.items()},
        packages,
        _open_error(h5py, path) if path else "",
    )


def _open_error(h5py: Any, path: str) -> str:
    try:
        with h5py.File(path, "r", locking=False) as file:
            len(file)  # the root group, whose header newer libraries check
    except OSError as error:
        return str(error)
    return ""


def main(words: list[str]) -> int:
    """Print a line of JSON; the one word is the path of a file, or there is none."""
    sys.stdout.write(json.dumps(asdict(describe(*words))) + "\n")
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
