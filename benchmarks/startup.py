"""How long importing torch, importing mpidp after it, and starting MPI take.

Usage: python benchmarks/startup.py REPEATS. Each repeat is a process of its own: `--one` is such a process.
"""

import subprocess
import sys
import time
from statistics import median

NAMES = ("torch", "numpy and h5py", "mpidp after them", "mpidp.init", "of it, MPI itself", "of it, checks")


def one() -> list[float]:
    """Seconds of each part, in this process."""
    start = time.perf_counter()
    import torch  # noqa: F401

    with_torch = time.perf_counter()
    import h5py  # noqa: F401
    import numpy  # noqa: F401

    with_h5py = time.perf_counter()
    import mpidp
    from mpidp.train import trainer  # noqa: F401  and with it all that a job imports

    imported = time.perf_counter()
    from mpidp.world.mpi import MPI

    before_mpi = time.perf_counter()
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    started = time.perf_counter()
    mpidp.init()
    done = time.perf_counter()
    checks_s = _checks()
    return [
        with_torch - start,
        with_h5py - with_torch,
        imported - with_h5py,
        done - before_mpi,
        started - before_mpi,
        checks_s,
    ]


def _checks() -> float:
    """Seconds of the checks that every start makes of libraries and cores."""
    from mpidp.world import start
    from mpidp.world.mpi import warn_of_cores

    world = start.init()
    begun = time.perf_counter()
    start._start_mpi()
    warn_of_cores(world.comm, world.host, 1, stacklevel=1)
    return time.perf_counter() - begun


def main(words: list[str]) -> None:
    """Print medians, one line a part."""
    if "--one" in words:
        print(" ".join(f"{value:.4f}" for value in one()))
        return
    runs = []
    for _ in range(int(words[0])):
        line = subprocess.run(
            [sys.executable, __file__, "1", "--one"], check=True, capture_output=True, text=True
        ).stdout.splitlines()[-1]
        runs.append([float(value) for value in line.split()])
    own = [run[2] + run[3] - run[4] for run in runs]  # beyond torch, numpy, h5py, and MPI's own start
    for name, values in [*zip(NAMES, zip(*runs, strict=True), strict=True), ("mpidp's own share", own)]:
        print(f"{name:<20} {median(values):.3f} s ({min(values):.3f} to {max(values):.3f})")


if __name__ == "__main__":
    main(sys.argv[1:])
