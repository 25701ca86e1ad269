"""Enters: something that reads. Leaves: its result, after another attempt or two where an error may pass."""

import errno
import re
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_TRANSIENT = {errno.EIO, errno.ESTALE, errno.EINTR}
_BACK_OFF_S = (0.1, 0.4, 1.6)


def retried(
    action: Callable[[], T], failure: OSError | None = None, before_again: Callable[[], None] | None = None
) -> T:
    """Return action(), called again a few times, with pauses, after an I/O error that may pass.

    failure: of an attempt that was already made. before_again: called before each further attempt.
    """
    for pause_s in _BACK_OFF_S:
        try:
            if failure is not None:
                raise failure
            return action()
        except OSError as error:
            if error_number(error) not in _TRANSIENT:
                raise
            failure = None
        time.sleep(pause_s)
        if before_again is not None:
            before_again()
    return action()


def error_number(error: OSError) -> int | None:
    """Return the system's error number; HDF5 often only writes it into its text."""
    written = re.search(r"errno = (\d+)", str(error))
    return error.errno or (int(written.group(1)) if written else None)
