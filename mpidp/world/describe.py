"""An installed mpi4py enters; what the MPI library behind it says of itself leaves. `main` is run as a child.

No torch: a library is looked at in a fraction of a second, and on a login node in a child process whose crash says
something too.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from mpidp.world.library import Library
from mpidp.world.mapped import library_hint, mapped
from mpidp.world.maps import MAPS
from mpidp.world.noise import without_noise


def thread_level() -> str:
    """The name of the thread level that MPI was started with, such as "MPI_THREAD_MULTIPLE"."""
    from mpidp.world.mpi import MPI

    names = ("THREAD_SINGLE", "THREAD_FUNNELED", "THREAD_SERIALIZED", "THREAD_MULTIPLE")
    return next(f"MPI_{name}" for name in names if getattr(MPI, name) == MPI.Query_thread())


def describe() -> Library:
    """What is known of the library of this process, started or not. Not collective."""
    from mpidp.world.mpi import MPI

    started = bool(MPI.Is_initialized())
    major, minor = MPI.Get_version()
    return Library(
        text=MPI.Get_library_version().strip("\0 \n"),
        standard=f"{major}.{minor}",
        abi=".".join(Path(MPI.__file__ or "").name.split(".")[:2]),
        thread_level=thread_level() if started else "",
        size=MPI.COMM_WORLD.size if started else 0,
        says_cuda=library_hint() if started else None,
        mapped=mapped(MAPS.read_text() if MAPS.exists() else ""),
    )


def main() -> int:
    """Start MPI in a world of one, print a line of JSON, and end."""
    from mpidp.world.mpi import MPI

    with without_noise():
        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    sys.stdout.write(json.dumps(asdict(describe())) + "\n")
    sys.stdout.flush()
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main())
