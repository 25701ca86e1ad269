"""The loggers `mpidp` and `mpidp.rank`, and standard streams whose reader may be gone.

The library prints nothing on standard output, which belongs to the program. `mpidp` is the logger of the job: rank 0
logs there (`World.log_once`) and, from WARNING up, any rank. `mpidp.rank` is for what concerns one rank alone, such as
how long a checkpoint took: it goes to a run's `logs/` and to the program's own handlers.
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
    """Writes the job's log lines to standard error, as long as the program has no handlers at the root logger.

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
        except (OSError, ValueError):  # the reader has gone, which must not end training
            job_log.removeHandler(self)


def log_to_stderr(guard: "AbortGuard") -> None:
    """Has the logger `mpidp` write to standard error, unless it or the root logger has handlers. Not collective."""
    if job_log.hasHandlers():
        return
    job_log.addHandler(StderrHandler(guard))
    if job_log.level == logging.NOTSET:
        job_log.setLevel(logging.INFO)


def pass_on_output() -> None:
    """Flushes what the program has printed, before a last message, which a failure to flush must not prevent."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):  # no reader, a full disk, or closed
        discard_output()


def discard_output() -> None:
    """Discards standard output from now on, with what could not be written before."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != STDOUT:  # equal if the program was started without standard output
        os.dup2(nowhere, STDOUT)
        os.close(nowhere)
    if sys.stdout is None:
        sys.stdout = open(STDOUT, "w")  # noqa: SIM115  (until the end of the process)


def is_unread() -> bool:
    """Whether standard output is a pipe whose reader has gone."""
    poll = select.poll()
    poll.register(STDOUT, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
