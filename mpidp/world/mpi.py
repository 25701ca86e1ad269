"""mpi4py's `MPI` module, imported without starting MPI, and the end of MPI at exit.

This package ends MPI, unless mpi4py was imported before it. mpi4py holds Python's lock in `MPI_Finalize`, so no Python
thread could limit its time: faulthandler's thread, which is not a Python thread, does.
"""

import atexit
import faulthandler
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mpi4py

from mpidp.errors import LaunchError

STDERR = 2  # the descriptor: `sys.stderr` may be closed by now
MOST_S = 1e9  # faulthandler takes no more; thirty years


@contextmanager
def last_wait(timeout_s: float) -> Iterator[None]:
    """A context manager: a block that takes longer than so many seconds ends the process with 1; 0 for no limit.

    A process has one such timer: one that the user's program had set is cancelled. Not collective.
    """
    if timeout_s:
        faulthandler.dump_traceback_later(min(timeout_s, MOST_S), exit=True, file=STDERR)
    try:
        yield
    finally:
        if timeout_s:
            faulthandler.cancel_dump_traceback_later()


mpi4py.rc.initialize = False  # mpidp.init() starts MPI, so that an import on a login node does not
# A program that imported mpi4py first has decided how MPI ends.
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
    """Leaves out `MPI_Finalize` at exit: it may wait for ever for a rank that has died."""
    global _ends
    _ends = False


def finalize() -> None:
    """Ends MPI at exit, after all functions that were registered since this package was imported."""
    timeout_s = max((function() for function in _before_end), default=0.0)
    # A forked child runs this too, but MPI belongs to its parent.
    if _ends and os.getpid() == _process and MPI.Is_initialized() and not MPI.Is_finalized():
        with last_wait(timeout_s):
            MPI.Finalize()


if ENDS_MPI:
    atexit.register(finalize)
