"""Behaviour 28: 10^5 batches of a streaming loader, in a process of their own; memory, threads and files stay flat."""

import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

BATCHES = 100_000
SOAK = """
import gc
import os
import resource
import sys
import threading

from mpidp.hdf5.loader import HDF5Loader

path, shuffle, batches = sys.argv[1], sys.argv[2], int(sys.argv[3])


def used():
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as statm:
        pages = int(statm.read().split()[1])
    return pages * resource.getpagesize() // 1024, len(os.listdir("/proc/self/fd")), threading.active_count()


loader = HDF5Loader(path, ("x", "y"), 2, shuffle=shuffle, streams=8, mixing_chunks=2, threads=1)
count = total = 0
marks = []
while count < batches:
    for batch in loader:
        total += int(batch.y.sum())
        count += 1
        if count in (batches // 5, batches // 2, batches):
            marks.append(used())
        if count == batches:
            break
loader.close()
assert threading.active_count() == 1, threading.enumerate()
print(loader.epoch, total, *(figure for mark in marks for figure in mark))
"""


@pytest.mark.job
@pytest.mark.timeout(300)
@pytest.mark.parametrize("shuffle", ["streams", "full"])
def test_memory_is_flat(tmp_path: Path, shuffle: str) -> None:
    """Between a fifth of the batches and all of them."""
    rows, batches = 20_000, BATCHES if shuffle == "streams" else BATCHES // 5
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.zeros((rows, 4), "u1"), chunks=(500, 4), compression="gzip")
        file.create_dataset("y", data=np.arange(rows), chunks=(700,))
    arguments = [sys.executable, "-c", SOAK, str(tmp_path / "a.h5"), shuffle, str(batches)]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr
    epoch, total, *figures = map(int, ended.stdout.split())
    epochs, rest = divmod(2 * batches, rows)
    assert rest == 0 and epoch in (epochs - 1, epochs) and total == epochs * sum(range(rows))
    resident_kib, files, threads = (figures[each::3] for each in range(3))
    assert max(resident_kib) - resident_kib[0] < 8 * 1024
    assert max(files) <= files[0] + 2 and max(threads) <= threads[0] + 1 <= 4
