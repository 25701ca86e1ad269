"""The exit of a rank: a failure ends the whole job, any other exit waits for the other ranks.

If a rank ended by itself, the others would wait in a collective until the time limit. So an uncaught exception, in any
thread or in a function that `atexit` calls, is printed with rank, node, step and phase, and aborts all ranks. A rank
whose main program is over for another reason, `sys.exit` with any code included, tells the watchdog and waits until all
ranks have come to this point; if others wait for a call that it will never make, the watchdog ends the job.
"""

import errno
import fcntl
import os
import signal
import socket
import stat
import struct
import sys
import termios
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, TextIO

from mpidp.errors import SHARED_MARK
from mpidp.world import mpi, signals
from mpidp.world.log import pass_on_output
from mpidp.world.mpi import MPI, last_wait
from mpidp.world.status import START, status

if TYPE_CHECKING:
    from mpidp.world.watchdog import Watchdog
    from mpidp.world.world import World

# sysexits.h calls it EX_TEMPFAIL: try again later. Job scripts requeue on it.
STOPPED_EARLY = 75
# How long a rank waits for rank 0 to print an error that all ranks share, before it ends the job itself.
SHARED_ERROR_GRACE_S = 10.0
INTERRUPT_GRACE_S = 2.0
# How long a launcher may take to read a last message, and then to pass it on.
READ_TIMEOUT_S, PASS_ON_S, POLL_S = 2.0, 0.1, 0.001
LEAVE_POLL_S = 0.01
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
    """Hooks that turn the failure of this rank into the end of the job.

    Attributes:
        rank: number of this rank.
        tag: the prefix of this rank's messages, such as "[rank 1 of 4 on node2]".
        before_abort: called before the job is aborted; stops other threads from calling MPI.
        last_words: returns the end of the message for Ctrl-C: how the run can be continued.
    """

    def __init__(self, rank: int, size: int, host: str):
        self._host = host
        self.renumber(rank, size)
        self.before_abort: Callable[[], None] = lambda: None
        self.last_words: Callable[[], str] = str
        self._former_unraisable = sys.unraisablehook

    def renumber(self, rank: int, size: int) -> None:
        """Sets this rank's new number, after some ranks have died and the others go on."""
        self.rank = rank
        self.tag = f"[rank {rank} of {size} on {self._host}]"

    def install(self) -> None:
        """Installs the hooks for uncaught exceptions."""
        sys.excepthook = self.on_exception
        threading.excepthook = self.on_thread_exception
        sys.unraisablehook = self.on_unraisable

    def abort(self, code: int) -> None:
        """Ends all ranks; does not return."""
        self.before_abort()
        MPI.COMM_WORLD.Abort(code)

    def end_job(self, text: str, code: int, thread: str = "") -> None:
        """Prints the text, with rank, node, thread, step and phase, and ends all ranks."""
        with self.aborting(code):
            # Step and phase, once there has been one.
            where = "" if status.phase == START and status.step == 0 else f"{status.where()}: "
            self.tell(f"{self.tag} {thread}{where}{text}")

    @contextmanager
    def aborting(self, code: int) -> Iterator[None]:
        """Ends all ranks after the block, also if it fails: by a full disk, a closed pipe, another Ctrl-C."""
        try:
            yield
        finally:
            self.abort(code)

    def on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None, thread: str = ""
    ) -> None:
        """Prints the traceback and ends the job. An error that all ranks raise is printed by rank 0 alone."""
        if issubclass(kind, KeyboardInterrupt):
            self.on_interrupt()
            return
        with self.aborting(1):
            if getattr(error, SHARED_MARK, False) and self.rank != 0:
                time.sleep(SHARED_ERROR_GRACE_S)  # normally rank 0's abort ends this sleep; if not, this rank aborts
            if is_out_of_memory(error):
                error.add_note(f"This rank ran out of memory. {MEMORY_ADVICE}")
            self.end_job("".join(traceback.format_exception(kind, error, trace)), 1, thread)

    def on_interrupt(self) -> None:
        """Ctrl-C: one line for the job, and exit code 130. Mostly every rank is interrupted, and rank 0 prints it."""
        code = 128 + signal.SIGINT
        with self.aborting(code):
            if self.rank != 0:
                time.sleep(INTERRUPT_GRACE_S + min(self.rank, 4) / 2)  # likewise
            self.end_job(f"interrupted{self.last_words()}", code)

    def on_thread_exception(self, arguments: "threading.ExceptHookArgs") -> None:
        """The same for a helper thread; SystemExit in a thread ends only that thread, as usual in Python."""
        if arguments.exc_type is SystemExit:
            return
        error = arguments.exc_value or arguments.exc_type()
        name = arguments.thread.name if arguments.thread else "unknown"
        self.on_exception(arguments.exc_type, error, arguments.exc_traceback, f"in thread {name} ")

    def on_unraisable(self, arguments: "sys.UnraisableHookArgs") -> None:
        """An exception in a function that `atexit` called is a failure; others that nobody can catch are not."""
        error = arguments.exc_value
        if error is not None and not isinstance(error, SystemExit) and "atexit" in (arguments.err_msg or ""):
            self.on_exception(arguments.exc_type, error, arguments.exc_traceback, "in a function called at exit ")
        self._former_unraisable(arguments)

    def tell(self, text: str) -> None:
        """Prints on standard error, and waits until a launcher has read it."""
        pass_on_output()
        sys.stderr.write(text if text.endswith("\n") else text + "\n")
        sys.stderr.flush()
        wait_until_read(sys.stderr)


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


class ExitBarrier:
    """The wait for all ranks at exit, or when the program ends MPI if that is earlier. Making one is not collective.

    Args:
        watchdog: ends the job if others wait for this rank after its main program is over.

    Attributes:
        watchdog: the same; replaced by a new one when ranks have died.
    """

    def __init__(self, watchdog: "Watchdog"):
        self.watchdog = watchdog
        self._has_left = False
        self._timeout_s = 0.0
        self._process = os.getpid()
        mpi.before_end(self)
        # MPI deletes the attributes of COMM_SELF first when it ends, and still works then. It is deleting this one
        # when it calls, so it must not be told to do so once more.
        self._key = MPI.Comm.Create_keyval(delete_fn=lambda *_: self._leave())
        MPI.COMM_SELF.Set_attr(self._key, True)

    def __call__(self) -> float:
        """Waits until all ranks have left; returns the time limit in seconds for the end of MPI. Collective."""
        if not self._has_left and os.getpid() == self._process:
            self._leave()
            MPI.COMM_SELF.Delete_attr(self._key)
        return self._timeout_s

    def _leave(self) -> None:
        if self._has_left or os.getpid() != self._process:
            return
        self._has_left = True
        pass_on_output()  # what this rank has printed is not lost if the job is aborted now
        status.has_left = True
        self.watchdog.wake()
        mailbox = self.watchdog.mailbox
        if mailbox is not None:
            request = mailbox.comm.Ibarrier()
            with status.waiting("the job's end", self.watchdog.size):
                while not _is_done(request):
                    time.sleep(LEAVE_POLL_S)
        if mpi.is_elastic():
            self.watchdog.stop()  # when the last rank is here, others may be gone already
            return
        # From here to the end of MPI ranks wait for each other without a watchdog.
        is_all = self.watchdog.size == MPI.COMM_WORLD.size
        if is_all and self.watchdog.abort_s and mailbox is not None:  # else others may still be working
            self._timeout_s = self.watchdog.abort_s + min(self.watchdog.rank, 2)  # so that one rank ends the job
        with last_wait(self._timeout_s):
            self.watchdog.close()


def _is_done(request: MPI.Request) -> bool:
    """Whether all ranks are here, or one has died, for which nobody waits any more."""
    try:
        return bool(request.Test())
    except MPI.Exception as error:
        if not mpi.is_survived(error):
            raise
        return True


def start_guarded() -> MPI.Intracomm:
    """Starts MPI and returns a duplicate of its world, for tools that need no torch. Collective.

    An exception on one rank ends the job, as everywhere; there is no watchdog.
    """
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    comm = MPI.COMM_WORLD.Dup()
    if comm.size > 1:
        AbortGuard(comm.rank, comm.size, socket.gethostname()).install()
    return comm


def leave(world: "World", code: int) -> NoReturn:
    """Ends the program on all ranks; the job's exit code, `code`, is rank 0's. Collective."""
    signals.ignore()
    sys.exit(code if world.rank == 0 else 0)
