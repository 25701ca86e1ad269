"""mpi4py's `MPI` module, imported in the one way this package wants it: not started by the import.

Nor ended by the interpreter's very last act, if nobody imported it before: a rank that leaves while others wait for it
must be able to end the job with its own exit code (`mpidp.world.departure`).
"""

import atexit
import os
import sys
from collections.abc import Callable

import mpi4py

from mpidp.errors import LaunchError
from mpidp.world.last_wait import last_wait

mpi4py.rc.initialize = False  # mpidp.init() starts MPI, so that an import on a login node does not
# Whoever imported it first has settled how it ends.
ENDS_MPI = "mpi4py.MPI" not in sys.modules
mpi4py.rc.finalize = not ENDS_MPI

try:
    from mpi4py import MPI
except RuntimeError as error:  # what mpi4py raises when it finds no library to load
    raise LaunchError(
        f"mpi4py cannot load an MPI library ({error}). On a cluster load its MPI module; on your own machine "
        f"`pip install mpich`; or name the library's file in MPI4PY_LIBMPI."
    ) from error

__all__ = ["ENDS_MPI", "MPI"]
_process = os.getpid()
before_end: list[Callable[[], None]] = []  # called first
end_timeout_s = 0.0  # for the end of MPI, once all ranks are known to have come to it; 0 for none
stays = False  # whether MPI is left as it is, because it may wait for ever for a rank that has died


def finalize() -> None:
    """Ends MPI, at exit: after all that users registered since they imported this package."""
    for function in before_end:
        function()
    # A forked child runs this, too, and MPI is its parent's.
    if not stays and os.getpid() == _process and MPI.Is_initialized() and not MPI.Is_finalized():
        with last_wait(end_timeout_s):
            MPI.Finalize()


if ENDS_MPI:
    atexit.register(finalize)
