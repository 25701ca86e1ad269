"""mpi4py's `MPI` module, imported without starting MPI, and the end of MPI at exit.

MPI is ended by a function of this package, unless somebody imported mpi4py before. mpi4py holds Python's lock in
`MPI_Finalize`, so that no Python thread could limit its time: faulthandler's thread, which is none, does.
"""

import atexit
import faulthandler
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mpi4py

from mpidp.errors import LaunchError

STDERR = 2  # the file itself: what stands in its place in `sys` may be closed by now
MOST_S = 1e9  # as much as faulthandler takes: thirty years


@contextmanager
def last_wait(timeout_s: float) -> Iterator[None]:
    """A block that must be over in so many seconds, or the process ends with 1; 0 for no limit. Not collective.

    A process has one such timer: one that the user's program had set is cancelled.
    """
    if timeout_s:
        faulthandler.dump_traceback_later(min(timeout_s, MOST_S), exit=True, file=STDERR)
    try:
        yield
    finally:
        if timeout_s:
            faulthandler.cancel_dump_traceback_later()


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

__all__ = ["ENDS_MPI", "MPI", "before_end", "never_end"]
_process = os.getpid()
_before_end: list[Callable[[], float]] = []
_ends = True


def before_end(function: Callable[[], float]) -> None:
    """Has a function called at exit, before MPI ends; it returns how many seconds that end may take, 0 for no limit."""
    if ENDS_MPI:
        _before_end.append(function)
    else:
        atexit.register(function)


def never_end() -> None:
    """MPI is left as it is at exit: its end may wait for ever for a rank that has died."""
    global _ends
    _ends = False


def finalize() -> None:
    """Ends MPI, at exit: after all that users registered since they imported this package."""
    timeout_s = max((function() for function in _before_end), default=0.0)
    # A forked child runs this, too, and MPI is its parent's.
    if _ends and os.getpid() == _process and MPI.Is_initialized() and not MPI.Is_finalized():
        with last_wait(timeout_s):
            MPI.Finalize()


if ENDS_MPI:
    atexit.register(finalize)
