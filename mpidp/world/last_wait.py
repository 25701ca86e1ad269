"""A number of seconds comes in; a wait that lasts longer ends the process, with its stacks on the screen.

For the end of MPI: mpi4py holds Python's lock there, so that no thread of Python could look at the clock. The thread of
faulthandler is not one of Python's; but its clock goes on while a scheduler has suspended the job.
"""

import faulthandler
from collections.abc import Iterator
from contextlib import contextmanager

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
