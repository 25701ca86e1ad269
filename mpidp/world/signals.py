"""Signals that ask this process to stop come in; which one came goes out, when training asks between two steps.

Schedulers warn before they kill: SIGTERM (preemption, `scancel`, a service manager), SIGUSR2 (`sbatch --signal`). The
handlers only take a note, so a step is never cut in two. Starts no MPI: the command line watches before anything else
is imported, because until then SIGUSR2 ends the process.
"""

import signal
import threading
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)

_former: dict[signal.Signals, Any] = {}
_received: signal.Signals | None = None


def watch() -> None:
    """From now on stop signals are noted instead of ending this process. Idempotent; only the main thread may call it.

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
    """Stop signals do again what they did before `watch`, and what came is forgotten. Idempotent."""
    global _received
    for number, handler in _former.items():
        signal.signal(number, handler)
    _former.clear()
    _received = None


def ignore() -> None:
    """Stop signals are not heard any more, up to the end of this process.

    For ranks that all leave: a launcher that ends a job on its first bad exit code (`srun -K`) sends SIGTERM to those
    that are still clearing up, and would then report that signal instead of the code.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def received() -> signal.Signals | None:
    """The first stop signal that came since `watch`, or None."""
    return _received


def _note(number: int, frame: FrameType | None) -> None:
    global _received
    _received = _received or signal.Signals(number)
