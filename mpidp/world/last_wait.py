"""A number of seconds comes in; a wait that lasts longer ends the process, with its stacks on the screen.

For the end of MPI: mpi4py holds Python's lock there, so that no thread of Python could look at the clock. The thread of
faulthandler is not one of Python's.
"""

import faulthandler
import sys
from collections.abc import Iterator
from contextlib import contextmanager

STDERR = 2  # the file itself: whoever put something else in the place of `sys.stderr` may be gone


@contextmanager
def last_wait(timeout_s: float) -> Iterator[None]:
    """A block that must be over in so many seconds; 0 for no limit. Else the process ends with 1. Not collective."""
    if timeout_s:
        sys.stderr.flush()
        faulthandler.dump_traceback_later(timeout_s, exit=True, file=STDERR)
    try:
        yield
    finally:
        if timeout_s:
            faulthandler.cancel_dump_traceback_later()
