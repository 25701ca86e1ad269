"""The loggers `mpidp` and `mpidp.rank`, and standard streams whose reader may be gone.

The library prints nothing on standard output, which is the program's. Two loggers: `mpidp` is what the job has to say,
told by rank 0 (`World.log_once`) and, from WARNING up, by any rank; `mpidp.rank` is what concerns one rank alone, such
as how long a checkpoint took: it goes to a run's `logs/` and to handlers of the program's own.
"""

import logging
import os
import select
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpidp.world.exit import AbortGuard


job_log = logging.getLogger("mpidp")
STDOUT = 1


class StderrHandler(logging.Handler):
    """Writes what the job has to say, a line at a time, as long as the program has no handlers at the root logger.

    Args:
        guard: knows this rank's number, which changes when other ranks have died.
    """

    def __init__(self, guard: "AbortGuard"):
        super().__init__()
        self._guard = guard

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        if logging.root.handlers and job_log.propagate:
            return False  # set up after `mpidp.init()`: no line comes twice
        return record.levelno >= logging.WARNING or (record.name == job_log.name and self._guard.rank == 0)

    def emit(self, record: logging.LogRecord) -> None:
        """Writes in one piece: launchers mix what several ranks write."""
        try:
            whose = f"{self._guard.tag} " if self._guard.rank else ""
            sys.stderr.write(f"mpidp: {whose}{self.format(record)}\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # nobody reads it any more, and no training ends for that
            job_log.removeHandler(self)


def log_to_stderr(guard: "AbortGuard") -> None:
    """Has the logger `mpidp` write to standard error, unless it or the root logger has handlers. Not collective."""
    if job_log.hasHandlers():
        return
    job_log.addHandler(StderrHandler(guard))
    if job_log.level == logging.NOTSET:
        job_log.setLevel(logging.INFO)


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
