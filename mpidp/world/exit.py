"""An exception nobody caught in, the end of the whole job out, with the cause on the screen.

A rank that dies quietly leaves the others waiting in a collective until the time limit. So every way out of a rank
that means failure (an uncaught exception in any thread or at exit, `sys.exit(n)` with n not 0) prints what happened,
tagged with rank, node, step and phase, and aborts all ranks. (Python 3.11 lets nobody see a bare `raise SystemExit(n)`:
`mpidp.world.exit` notices it when others wait for the rank.)
"""

import atexit
import builtins
import errno
import fcntl
import gc
import os
import signal
import stat
import struct
import sys
import termios
import threading
import time
import traceback
from collections.abc import Callable
from dis import opname
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from mpidp.errors import SHARED_MARK
from mpidp.world import communicators, mpi, signals
from mpidp.world.communicators import is_survived
from mpidp.world.log import pass_on_output
from mpidp.world.mpi import ENDS_MPI, MPI, last_wait
from mpidp.world.status import status

if TYPE_CHECKING:
    from mpidp.world.watchdog import Watchdog
    from mpidp.world.world import World


# How long a rank waits for rank 0 to print an error that all ranks share, before it ends the job itself.
SHARED_ERROR_GRACE_S = 10.0
INTERRUPT_GRACE_S = 2.0
# How long a launcher may take to read a last message, and then to pass it on.
READ_TIMEOUT_S, PASS_ON_S, POLL_S = 2.0, 0.1, 0.001
MEMORY_ADVICE = (
    "Give it fewer samples at once (train.micro_batch, or Batch.micro_batches in a loop of your own; data.memory_bytes "
    "for what the loader reads ahead), or use more ranks."
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the host or a device had no memory left: torch says so in a RuntimeError, Python in a MemoryError."""
    words = ("out of memory", "can't allocate memory")
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and any(word in str(error) for word in words))
    )


class AbortGuard:
    """Hooks that turn the failure of this rank into the end of the job. `abort(code)` must not return."""

    def __init__(self, rank: int, size: int, host: str, abort: Callable[[int], None], stream: TextIO | None = None):
        self.host = host
        self.renumber(rank, size)
        self.before_abort: Callable[[], None] = lambda: None  # quiets who would still call MPI
        self._abort = abort
        self.stream = stream
        self.where: Callable[[], str] = str  # says step and phase, where they are known
        self.last_words: Callable[[], str] = str  # says how an interrupted run can go on
        self._saved: tuple[Any, Any, Any, Any, Any] | None = None

    def renumber(self, rank: int, size: int) -> None:
        """The ranks have other numbers now, because some died and the others go on."""
        self.rank = rank
        self.tag = f"[rank {rank} of {size} on {self.host}]"

    def install(self) -> None:
        """Puts the hooks in place; a second call changes nothing."""
        if self._saved is not None:
            return
        # `exit` and `quit` are there only where Python's site module is.
        hooks = (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.exit)
        self._saved = (*hooks, vars(builtins).get("exit"))
        if self._saved[4] is not None:
            vars(builtins).update(exit=self.exit, quit=self.exit)
        sys.excepthook = self.on_exception
        threading.excepthook = self.on_thread_exception
        sys.unraisablehook = self.on_unraisable
        sys.exit = self.exit

    @property
    def is_installed(self) -> bool:
        """Whether the hooks are in place."""
        return self._saved is not None

    def remove(self) -> None:
        """Puts the former hooks back: from here on this rank may leave with any exit code, as all ranks do."""
        if self._saved is None:
            return
        sys.excepthook, threading.excepthook, sys.unraisablehook, sys.exit, builtin_exit = self._saved
        if builtin_exit is not None:
            vars(builtins).update(exit=builtin_exit, quit=builtin_exit)
        self._saved = None

    def abort(self, code: int) -> None:
        """Ends all ranks."""
        self.before_abort()
        self._abort(code)

    def on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None, where: str = ""
    ) -> None:
        """Prints the traceback, tagged, and aborts. An error shared by all ranks is printed by rank 0 alone."""
        if issubclass(kind, KeyboardInterrupt):
            self.on_interrupt()
            return
        if getattr(error, SHARED_MARK, False) and self.rank != 0:
            time.sleep(SHARED_ERROR_GRACE_S)  # rank 0's abort ends this sleep; after it nobody else will
        try:
            if is_out_of_memory(error):
                error.add_note(f"This rank ran out of memory. {MEMORY_ADVICE}")
            text = "".join(traceback.format_exception(kind, error, trace))
            self.tell(f"{self.tag}{where} {self.where()}{text}")
        finally:  # also where nothing can be printed any more: a full disk, a closed pipe
            self.abort(1)

    def on_interrupt(self) -> None:
        """Ctrl-C: one line for the job, and exit code 130. As a rule every rank is interrupted, and rank 0 says so."""
        try:
            if self.rank != 0:
                time.sleep(INTERRUPT_GRACE_S + min(self.rank, 4) / 2)  # likewise
            self.tell(f"{self.tag} {self.where()}interrupted{self.last_words()}")
        finally:
            self.abort(128 + signal.SIGINT)

    def on_thread_exception(self, arguments: "threading.ExceptHookArgs") -> None:
        """The same for a helper thread; SystemExit in a thread ends only that thread, as Python has it."""
        if arguments.exc_type is SystemExit:
            return
        error = arguments.exc_value or arguments.exc_type()
        name = arguments.thread.name if arguments.thread else "unknown"
        self.on_exception(arguments.exc_type, error, arguments.exc_traceback, f" in thread {name}")

    def on_unraisable(self, arguments: "sys.UnraisableHookArgs") -> None:
        """An exception in a function that `atexit` called is a failure; others that nobody can catch are not."""
        error = arguments.exc_value
        if error is not None and not isinstance(error, SystemExit) and "atexit" in (arguments.err_msg or ""):
            self.on_exception(arguments.exc_type, error, arguments.exc_traceback, " in a function called at exit")
        assert self._saved is not None
        self._saved[2](arguments)

    def exit(self, code: Any = None) -> NoReturn:
        """`sys.exit` that is noticed when nobody catches it."""
        if code is None or code == 0 or threading.current_thread() is not threading.main_thread():
            raise SystemExit(code)
        raise _WatchedExit(code, self)

    def on_exit(self, code: Any) -> None:
        """The interpreter is going down with a code that is not 0."""
        try:
            self.tell(f"{self.tag} {self.where()}left the job with sys.exit({code!r})")
        finally:
            self.abort(code if isinstance(code, int) else 1)

    def tell(self, text: str) -> None:
        """Prints, and waits until a launcher has read it."""
        pass_on_output()
        stream = self.stream or sys.stderr
        stream.write(text if text.endswith("\n") else text + "\n")
        stream.flush()
        wait_until_read(stream)


def wait_until_read(stream: TextIO) -> None:
    """Waits until nothing written to the stream is left in its pipe, for `READ_TIMEOUT_S` at most.

    A launcher that is told to abort may end without reading what its ranks have just written, and the cause would be
    lost. Linux tells how much of a pipe has not been read; the launcher then still has to pass on what it read.
    """
    try:
        descriptor = stream.fileno()
    except OSError:  # not a file: the text is in memory
        return
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        return
    start = time.monotonic()
    while time.monotonic() - start < READ_TIMEOUT_S:
        unread = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4))[0]
        if unread == 0:
            time.sleep(PASS_ON_S)
            return
        time.sleep(POLL_S)


class _WatchedExit(SystemExit):
    """A SystemExit that tells whether it ended the interpreter or was caught.

    Python offers no hook for an uncaught SystemExit, and at-exit handlers are not told the code. But the interpreter
    drops the exception after the last Python frame is gone, while code that catches it still has a frame. What is
    dropped later, when the interpreter clears up, may have been caught and kept.
    """

    def __init__(self, code: Any, guard: AbortGuard):
        super().__init__(code)
        self.guard = guard

    def __del__(self) -> None:
        # Hooks that were removed meanwhile: all ranks leave with the same code, and MPI may be over already.
        if not self.guard.is_installed or (sys.is_finalizing() and self._was_caught()):
            return
        try:
            sys._getframe(1)
        except ValueError:
            self.guard.on_exit(self.code)

    def _was_caught(self) -> bool:
        """Whether the frame that met the exception last went on and returned, instead of passing it on."""
        if self.__traceback__ is None:
            return False
        frame = self.__traceback__.tb_frame
        return opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")


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


# sysexits.h calls it EX_TEMPFAIL: try again later. Job scripts requeue on it.
STOPPED_EARLY = 75


def leave(world: "World", code: int) -> NoReturn:
    """Ends every rank; the job's exit code is rank 0's, `code`. Collective."""
    world.guard.remove()
    signals.ignore()
    try:
        world.barrier()
    except MPI.Exception as error:
        if not is_survived(error):  # else whoever died has left, too
            raise
    sys.exit(code if world.rank == 0 else 0)
