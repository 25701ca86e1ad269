"""What this process does: step, phase and waits for other ranks, their times for a trace, and stacks of threads.

One process is one rank, so there is one `status`. An update costs less than a microsecond and takes no lock; the
watchdog's thread reads it at any time.

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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple

from mpidp.world.system import RUNS, STOPPED, process_state

START, BETWEEN = "start", "between steps"
NO_BATCH = -1, -1
_NOTHING = nullcontext()
Kind = Literal["step", "phase", "wait", "work"]


class Span(NamedTuple):
    """An interval of time, by `time.monotonic_ns` of this node, in which a thread did one thing."""

    name: str
    kind: Kind
    thread: str
    start_ns: int
    stop_ns: int


class Spans:
    """The spans since it was made; any thread may add some, as appending to a list needs no lock.

    The phase `quiet` is not recorded.
    """

    def __init__(self, quiet: str = ""):
        self.found: list[Span] = []
        self._quiet = quiet
        self._since_ns = time.monotonic_ns()

    def end_phase(self, phase: str) -> None:
        """Ends a phase and begins the next one. Phases belong to the process and are set by one thread at a time."""
        now_ns = time.monotonic_ns()
        if phase != self._quiet:
            self.found.append(Span(phase, "phase", threading.main_thread().name, self._since_ns, now_ns))
        self._since_ns = now_ns

    def add(self, name: str, kind: Kind, start_ns: int) -> int:
        """Adds a span of this thread from `start_ns` to now; returns now."""
        stop_ns = time.monotonic_ns()
        self.found.append(Span(name, kind, threading.current_thread().name, start_ns, stop_ns))
        return stop_ns


@dataclass(frozen=True)
class Wait:
    """A thread of this rank in a call that returns when other ranks have made it too; `ranks` is 0 if not known."""

    name: str
    ranks: int
    thread: int


class Status:
    """What this rank is doing.

    Attributes:
        step: optimizer steps done.
        phase: part of the step, or of the job.
        since: when the phase began, by `time.monotonic`.
        is_long: whether the phase may keep the other ranks waiting without a limit.
        has_left: whether the main program is over.
        batch: epoch of the batch whose loss was weighed since the last reduction, and samples of the epoch up to its
            end.
        accumulating_pass: autograd's number of the backward pass that only accumulates, as it is of a micro-batch
            that is not the last; -1 before any.
        waits: by thread, the call in which it waits for other ranks.
        spans: the spans recorded for a trace; None while there is none.
        announce: called when a phase that may take long begins or ends; tells the other ranks.
    """

    def __init__(self) -> None:
        self.step = 0
        self.phase = START
        self.since = time.monotonic()
        self.is_long = False
        self.has_left = False
        self.batch = NO_BATCH
        self.accumulating_pass = -1
        self.waits: dict[int, Wait] = {}
        self.spans: Spans | None = None
        self.announce: Callable[[], None] = lambda: None

    def enter(self, phase: str, is_long: bool = False) -> None:
        """Begins a phase."""
        if (phase, is_long) != (self.phase, self.is_long):
            was_long = self.is_long
            if self.spans is not None:
                self.spans.end_phase(self.phase)
            self.phase, self.since, self.is_long = phase, time.monotonic(), is_long
            if is_long or was_long:
                self.announce()

    @contextmanager
    def during(self, phase: str, is_long: bool = False) -> Iterator[None]:
        """A context manager: a phase for the length of a block; after it the former phase goes on.

        An exception leaves the phase as it is, so that its message names the phase it came from.
        """
        before = self.phase, self.is_long
        self.enter(phase, is_long)
        yield
        self.enter(*before)

    def waiting(self, name: str, ranks: int = 0) -> "Waiting":
        """A context manager: this thread waits for other ranks."""
        return Waiting(self, Wait(name, ranks, threading.get_ident()))

    def working(self, name: str) -> AbstractContextManager[object]:
        """A context manager: this helper thread does something that a trace should show."""
        return _NOTHING if self.spans is None else _timed(self.spans, name)

    def longest_wait(self) -> Wait | None:
        """A thread that waits, the main one if it does."""
        waits = dict(self.waits)
        return waits.get(threading.main_thread().ident or 0) or next(iter(waits.values()), None)

    def where(self) -> str:
        """Step and phase, in words."""
        return f"at step {self.step:,}, in phase {self.phase}"


@contextmanager
def _timed(spans: Spans, name: str) -> Iterator[None]:
    start_ns = time.monotonic_ns()
    try:
        yield
    finally:
        spans.add(name, "work", start_ns)


class Waiting:
    """One wait. Inside another wait of the same thread, as where one helper calls another, the outer one counts."""

    __slots__ = ("_is_outer", "_spans", "_start_ns", "_status", "_wait")

    def __init__(self, status: Status, wait: Wait):
        self._status = status
        self._wait = wait
        self._is_outer = wait.thread not in status.waits

    def __enter__(self) -> None:
        if self._is_outer:
            self._status.waits[self._wait.thread] = self._wait
            self._spans = self._status.spans
            if self._spans is not None:
                self._start_ns = time.monotonic_ns()

    def __exit__(self, *error: object) -> None:
        if self._is_outer:
            del self._status.waits[self._wait.thread]
            if self._spans is not None:
                self._spans.add(self._wait.name, "wait", self._start_ns)


status = Status()


PACKAGE = str(Path(__file__).resolve().parents[1])
MOST_FRAMES = 12
# Files whose frames show only that there is a wait, or how Python started the program.
_HELPERS = ("/world/mpi.py", "/world/collectives.py", "/world/status.py", "contextlib.py", "threading.py", "/queue.py")
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
    """What a neighbour sees of a silent process: its state and, if it can still write it, its stack."""

    text: str
    is_stopped: bool = False


def look_at(address: Address) -> Look:
    """Looks at a process of this node."""
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
