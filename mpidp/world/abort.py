"""An exception nobody caught in, the end of the whole job out, with the cause on the screen.

A rank that dies quietly leaves the others waiting in a collective until the time limit. So every way out of a rank
that means failure (an uncaught exception in any thread or at exit, `sys.exit(n)` with n not 0) prints what happened,
tagged with rank, node, step and phase, and aborts all ranks. (Python 3.11 lets nobody see a bare `raise SystemExit(n)`:
`mpidp.world.departure` notices it when others wait for the rank.)
"""

import builtins
import errno
import fcntl
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
from typing import Any, NoReturn, TextIO

from mpidp.errors import SHARED_MARK
from mpidp.world.standard_output import pass_on_output

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
