"""A standard output that may have no reader any more comes in; one that can be written to without an error goes out."""

import os
import select
import sys

STDOUT = 1


def pass_on_output() -> None:
    """Flushes what the program has printed, on its way to a last message: a failure must not keep that from coming."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):  # no reader, a full disk, or closed
        discard_output()


def discard_output() -> None:
    """From here on standard output goes nowhere, what could not be written before included."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != STDOUT:  # as it is where the program was started without one
        os.dup2(nowhere, STDOUT)
        os.close(nowhere)
    if sys.stdout is None:
        sys.stdout = open(STDOUT, "w")  # noqa: SIM115  (until the end of the process)


def is_unread() -> bool:
    """Whether standard output is a pipe whose reader has gone."""
    poll = select.poll()
    poll.register(STDOUT, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
