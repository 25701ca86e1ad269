"""Signal handlers: requests to stop between two steps, and SIGTERM and SIGINT that end the job.

Schedulers warn before they kill: SIGTERM (preemption, `scancel`, a service manager), SIGUSR2 (`sbatch --signal`). The
handlers only record the signal, so a step is never interrupted. Starts no MPI: the command line calls `watch` before
anything else is imported, because until then SIGUSR2 ends the process.
"""

import os
import signal
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

from mpidp.world.status import status

if TYPE_CHECKING:
    from mpidp.world.exit import AbortGuard


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
# A launcher that cleans up after a failure sends SIGTERM to the other ranks, and SIGKILL soon after: such ranks must
# print nothing. And where all ranks got SIGTERM, rank 0 prints the message.
CLEARING_S, OTHERS_S = 1.5, 0.5
# How long the main thread may take to raise KeyboardInterrupt: while it waits for other ranks, and in another call.
WAITING_S, CALL_S, POLL_S = 1.0, 5.0, 0.05

_former: dict[signal.Signals, Any] = {}
_received: signal.Signals | None = None


def watch() -> None:
    """Records stop signals from now on, instead of ending the process. Idempotent; only for the main thread.

    Raises:
        RuntimeError: called from another thread, where Python cannot set signal handlers.
    """
    if _former:
        return
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("signals are watched from the main thread only: make the StopSignal there")
    for number in STOP_SIGNALS:
        _former[number] = signal.signal(number, _note)


def unwatch() -> None:
    """Restores the handlers from before `watch`, and forgets a recorded signal. Idempotent."""
    global _received
    for number, handler in _former.items():
        signal.signal(number, handler)
    _former.clear()
    _received = None


def ignore() -> None:
    """Ignores stop signals up to the end of this process.

    For ranks that all leave: a launcher that ends a job on its first bad exit code (`srun -K`) sends SIGTERM to those
    that are still cleaning up, and would then report that signal instead of the code.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def received() -> signal.Signals | None:
    """The first stop signal that came since `watch`, or None."""
    return _received


def _note(number: int, frame: FrameType | None) -> None:
    global _received
    _received = _received or signal.Signals(number)


class EndAtSignal:
    """Ends the job at a signal. To be made in the main thread; does nothing at a signal that has a handler already.

    SIGTERM ends it in any case. SIGINT (Ctrl-C) raises KeyboardInterrupt in the main thread, as usual: the program may
    catch it, and `AbortGuard` ends the job if it does not. A thread acts, not the handlers: Python runs those in the
    main thread, which may be in a call of MPI for an unlimited time. Where that keeps KeyboardInterrupt from being
    raised, this thread ends the job.

    Args:
        guard: ends the job.
    """

    def __init__(self, guard: "AbortGuard"):
        self._guard = guard
        self._has_acted = threading.Lock()
        self._raised_at = float("-inf")  # when KeyboardInterrupt was, last
        if threading.current_thread() is not threading.main_thread():
            return
        os.register_at_fork(after_in_child=self._forget)
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._raise)
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        former = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if former != -1:  # another part of the program, an event loop perhaps, is woken by signals
            signal.set_wakeup_fd(former)
            return
        threading.Thread(target=self._read, args=(reading,), name="mpidp-signals", daemon=True).start()

    def _forget(self) -> None:
        """Undoes this in a forked process: signals to it are not meant for this rank."""
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._act()

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self._raised_at = time.monotonic()
        signal.default_int_handler(number, frame)

    def _read(self, reading: int) -> None:
        while numbers := os.read(reading, 64):
            # A program that replaced the handler wants something else to happen.
            if signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) == self._handle:
                self._act()
            if signal.SIGINT in numbers and signal.getsignal(signal.SIGINT) == self._raise:
                self._await_raised()

    def _act(self) -> None:
        if not self._has_acted.acquire(blocking=False):
            return
        time.sleep(CLEARING_S + OTHERS_S * (self._guard.rank != 0))
        self._guard.end_job("was ended by SIGTERM", 128 + signal.SIGTERM)

    def _await_raised(self) -> None:
        sent_at = time.monotonic()
        while self._raised_at < sent_at - WAITING_S:  # it may have been raised before this thread woke up
            time.sleep(POLL_S)
            if time.monotonic() - sent_at > (WAITING_S if status.longest_wait() else CALL_S):
                self._guard.on_interrupt()
                return
