"""A rank whose main program is over comes in; it leaves when all others are over too, or ends a job that misses it.

MPI's own end waits for the other ranks as well, but there nobody notices that they wait for a call this rank will
never make, nor can say for whom.
"""

import atexit
import gc
import os
import signal
import time
from typing import TYPE_CHECKING

from mpidp.world import communicators, mpi
from mpidp.world.abort import AbortGuard
from mpidp.world.last_wait import last_wait
from mpidp.world.mpi import ENDS_MPI, MPI
from mpidp.world.standard_output import pass_on_output
from mpidp.world.status import status

if TYPE_CHECKING:
    from mpidp.world.watchdog import Watchdog

PAUSE_S = 0.01
CHILD_TIMEOUT_S = 3.0


class Departure:
    """Called once, at exit or when the program ends MPI, whichever comes first. Construction is not collective.

    Attributes:
        watchdog: tells whether others wait for this rank.

    Args:
        watchdog: the same.
        guard: ends the job.
    """

    def __init__(self, watchdog: "Watchdog", guard: AbortGuard):
        self.watchdog = watchdog
        self._guard = guard
        self._is_over = False
        self._process = os.getpid()
        if ENDS_MPI:
            mpi.before_end(self)
        else:
            atexit.register(self)
        # MPI deletes the attributes of COMM_SELF first when it ends, and still works then. It is deleting this one
        # when it calls, so it must not be told to do so once more.
        self._key = MPI.Comm.Create_keyval(delete_fn=lambda *_: self._leave(at_exit=False))
        MPI.COMM_SELF.Set_attr(self._key, True)

    def __call__(self) -> None:
        """Waits until all ranks have left. Collective."""
        if not self._is_over:
            self._leave(at_exit=True)
            if os.getpid() == self._process:
                MPI.COMM_SELF.Delete_attr(self._key)

    def _leave(self, at_exit: bool) -> None:
        if self._is_over or os.getpid() != self._process:
            return
        self._is_over = True
        status.has_left = True
        self.watchdog.wake()
        if self.watchdog.post is not None:
            request = self.watchdog.post.comm.Ibarrier()
            with status.waiting("the job's end", self.watchdog.size):
                while not self._have_left(request):
                    if self.watchdog.missed:
                        self._end_job(at_exit)
                        return
                    time.sleep(PAUSE_S)
        if communicators.is_elastic():
            self.watchdog.abandon()  # the last one here may meet ranks that are gone already
        else:
            self._close()

    def _close(self) -> None:
        """From here to the end of MPI ranks wait for each other without a watchdog."""
        timeout_s = 0.0
        if self.watchdog.abort_s and self.watchdog.post is not None:  # without letters, others may be at work still
            timeout_s = self.watchdog.abort_s + min(self.watchdog.rank, 2)  # so that one rank ends the job, and says so
        with last_wait(timeout_s):
            self.watchdog.close()
        mpi.limit_end(timeout_s)

    def _have_left(self, request: MPI.Request) -> bool:
        """Whether all ranks are here; of one that died nobody waits for anything any more."""
        try:
            return bool(request.Test())
        except MPI.Exception as error:
            if not communicators.is_survived(error):
                raise
            return True

    def _end_job(self, at_exit: bool) -> None:
        """Ends the job with the exit code that this process would have had, or 1 if that were 0 or is not known yet."""
        pass_on_output()
        code = _future_exit_code() if ENDS_MPI and at_exit else 1
        if os.getpid() != self._process:
            return  # this is the copy that finds out
        try:
            self._guard.tell(f"{self._guard.tag} {self._guard.where()}{self.watchdog.missed}")
        finally:
            self._guard.abort(code or 1)


def _future_exit_code() -> int:
    """The exit code that this process is about to end with; it returns in a second process, too.

    Python 3.11 tells nobody that `raise SystemExit(7)` ended the main program, but the code is there when the
    interpreter has ended: so a copy of this process goes on to its end, without MPI, and is asked.
    """
    child = os.fork()
    if child == 0:
        gc.freeze()  # or the interpreter would look through all its objects once more before it ends
        return 0
    start = time.monotonic()
    while time.monotonic() - start < CHILD_TIMEOUT_S:
        ended, how = os.waitpid(child, os.WNOHANG)
        if ended:
            return max(0, os.waitstatus_to_exitcode(how))
        time.sleep(PAUSE_S)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 0
