"""SIGTERM comes in, where the program has no use for it; the end of the whole job goes out, with the cause named.

A thread acts, not the handler: Python runs handlers in the main thread, between two of its instructions, and that
thread may be waiting inside MPI for as long as it likes.
"""

import os
import signal
import threading
import time
from types import FrameType

from mpidp.world.abort import AbortGuard

# A launcher that clears up after a failure sends SIGTERM to the other ranks, and SIGKILL soon after: what it clears
# away has nothing to say. And where all ranks were ended, rank 0 says it.
CLEARING_S, OTHERS_S = 1.5, 0.5


class Terminated:
    """Ends the job at a SIGTERM. To be made in the main thread; does nothing where SIGTERM has a handler already.

    Args:
        guard: ends the job.
    """

    def __init__(self, guard: AbortGuard):
        self._guard = guard
        self._has_acted = threading.Lock()
        if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            return
        if threading.current_thread() is not threading.main_thread():
            return
        signal.signal(signal.SIGTERM, self._handle)
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        former = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if former != -1:  # another part of the program, an event loop perhaps, is woken by signals
            signal.set_wakeup_fd(former)
            return
        threading.Thread(target=self._read, args=(reading,), name="mpidp-sigterm", daemon=True).start()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._act()

    def _read(self, reading: int) -> None:
        while numbers := os.read(reading, 64):
            # Who replaces the handler wants to do something else.
            if signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) == self._handle:
                self._act()

    def _act(self) -> None:
        if not self._has_acted.acquire(blocking=False):
            return
        time.sleep(CLEARING_S + OTHERS_S * (self._guard.rank != 0))
        try:
            self._guard.tell(f"{self._guard.tag} {self._guard.where()}was ended by SIGTERM")
        finally:
            self._guard.abort(128 + signal.SIGTERM)
