"""Files opened in turn, so that few are open at once; where no descriptor is left, the limit is named."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hdf5_rows import write

from mpidp.errors import DataError
from mpidp.hdf5.decode import RawFiles
from mpidp.hdf5.files.describe import describe
from mpidp.hdf5.loader import HDF5Loader


def test_few_descriptors(tmp_path: Path) -> None:
    """Behaviour 28: the number of open files is bounded, and bytes are those of the file that was asked for."""
    paths = [tmp_path / f"{number}.bin" for number in range(9)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 10)
    before = len(os.listdir("/proc/self/fd"))
    with closing(RawFiles(most_open=3)) as files:
        into = np.empty(4, np.uint8)
        for number in [*range(9), *range(9)]:
            files.read(str(paths[number]), 2, into)
            assert (into == number).all()
            assert len(os.listdir("/proc/self/fd")) <= before + 3
        with pytest.raises(DataError, match=r"8\.bin: ends at byte 10, where 2 more were expected"):
            files.read(str(paths[8]), 8, into)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """How many files this process may open, which is not many."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = len(os.listdir("/proc/self/fd")) + 40
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    yield most
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("options", [{}, {"scaleoffset": 0, "chunks": (2,)}], ids=["fast path", "slow path"])
@pytest.mark.filterwarnings("ignore:.*is read by HDF5, one thread at a time")
def test_too_many_open_files(tmp_path: Path, few_descriptors: int, options: dict[str, Any]) -> None:
    """More files than may be open: they are opened in turn, and rows are right."""
    paths = []
    for number in range(150):
        paths.append(tmp_path / f"{number}.h5")
        with h5py.File(paths[-1], "w") as file:
            file.create_dataset("x", data=np.arange(4) + 4 * number, **options)
    loader = HDF5Loader(paths, ("x",), 16, streams=20)
    for _ in range(2):
        rows = []
        for batch in loader:
            np.testing.assert_array_equal(batch.x, batch.indices)
            rows += batch.indices.tolist()
        assert sorted(rows) == list(range(600))
    loader.close()


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    """Errno 24 is named, with the limit to raise."""
    path = write(tmp_path / "a.h5", x=np.arange(5))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open("/dev/null", os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 20, limits[1]))
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError as error:
        assert error.errno == errno.EMFILE
    try:
        with pytest.raises(DataError, match=r"a\.h5: too many open files; raise the limit \(ulimit -n\)"):
            describe(path, ("x",))
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
