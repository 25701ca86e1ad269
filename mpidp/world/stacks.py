"""Threads of this process in; where they are in their code out, as text."""

import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

PACKAGE = str(Path(__file__).resolve().parents[1])
MOST_FRAMES = 12
# Frames that say only that there is a wait, or how Python came to a program.
_HELPERS = ("watched_comm.py", "scalar.py", "waiting.py", "status.py", "contextlib.py", "threading.py", "/queue.py")
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
    """Where a thread is, and the line of the user's program that brought the main thread to where it is."""
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
