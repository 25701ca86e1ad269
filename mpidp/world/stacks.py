"""Stacks of threads as text: of this process, and of one on this node that does not answer.

A rank inside a library that holds Python's lock can run no other Python thread. But its signal handler writes the
stacks, in C, to a file in its memory, which a neighbour on its node reads.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from mpidp.world.system import RUNS, STOPPED, process_state

PACKAGE = str(Path(__file__).resolve().parents[1])
MOST_FRAMES = 12
# Files whose frames show only that there is a wait, or how Python started the program.
_HELPERS = ("communicators.py", "collectives.py", "status.py", "contextlib.py", "threading.py", "/queue.py")
_STARTERS = ("<frozen", "importlib", "runpy.py", "torch/")


def stack(thread: int) -> str:
    """The last calls of a thread, the innermost last; "" when it has ended. Torch's own are left out."""
    frame = _innermost(sys._current_frames().get(thread), _is_no_helper)
    calls = [call for call in traceback.extract_stack(frame) if "/torch/" not in call.filename] if frame else []
    return "".join(traceback.format_list(calls[-MOST_FRAMES:]))


def main_thread() -> int:
    """The identifier of the main thread."""
    return threading.main_thread().ident or 0


def call_site(thread: int) -> str:
    """Where a thread is, and the innermost line of the user's program in the main thread."""
    frames = sys._current_frames()
    inner = _innermost(frames.get(thread), _is_no_helper)
    user = _innermost(frames.get(main_thread()), _is_users)
    if inner is None:
        return "a thread that has ended"
    return _place(inner) if user is None or user is inner else f"{_place(inner)}, called at {_place(user)}"


def _is_no_helper(name: str) -> bool:
    return not name.endswith(_HELPERS)


def _is_users(name: str) -> bool:
    return not name.startswith(PACKAGE) and not any(part in name for part in _STARTERS) and _is_no_helper(name)


def _innermost(frame: FrameType | None, wanted: Callable[[str], bool]) -> FrameType | None:
    while frame is not None and not wanted(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _place(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    name = "mpidp" + path.removeprefix(PACKAGE) if path.startswith(PACKAGE) else path
    return f"{name}:{frame.f_lineno} ({frame.f_code.co_name})"


SIGNAL = signal.SIGRTMAX - 3  # one that no launcher or library is known to use
WRITING_S = 0.3
MOST_BYTES = 4000


@dataclass(frozen=True)
class Address:
    """How a neighbour finds a process: its pid, the descriptor of its open file, -1 for none, and the file's inode.

    Only a process that has this file open has the handler; any other would be killed by the signal.
    """

    pid: int
    file: int
    inode: int = 0


def prepare() -> Address:
    """Lets neighbours ask this process. To be called in the main thread; without effect if the signal is taken."""
    if signal.getsignal(SIGNAL) != signal.SIG_DFL:
        return Address(os.getpid(), -1)
    file = os.memfd_create("mpidp-stacks")
    faulthandler.register(SIGNAL, file=file)
    return Address(os.getpid(), file, os.fstat(file).st_ino)


@dataclass(frozen=True)
class Look:
    """What a neighbour sees of a silent process: its state and, if it can still write it, its stack.

    Attributes:
        text: state, and stack if there is one.
        is_stopped: whether the process does not run at all.
    """

    text: str
    is_stopped: bool = False


def look_at(address: Address) -> Look:
    """Looks at a process of this node; returns its state and stack."""
    state, text = process_state(address.pid)
    if state not in RUNS or address.file < 0:
        return Look(text, state in STOPPED)
    path = f"/proc/{address.pid}/fd/{address.file}"
    try:
        before = os.stat(path)
        if before.st_ino != address.inode:
            return Look(f"process {address.pid} is another one: this rank's has ended, or has numbers of its own")
        os.kill(address.pid, SIGNAL)
        time.sleep(WRITING_S)
        with open(path, "rb") as file:
            file.seek(before.st_size)
            written = file.read().decode(errors="replace")
    except OSError as error:  # it has ended meanwhile, has no such file, or is another user's
        return Look(f"{text} ({error})")
    main = written.rstrip().rpartition("\n\n")[2]  # the main thread comes last
    return Look(f"{text}\n{main[:MOST_BYTES]}" if main else text)
