"""What the threads of this process do, and when they begin and end it, comes in; a list of it goes out."""

import threading
import time
from typing import Literal, NamedTuple

Kind = Literal["step", "phase", "wait", "work"]


class Span(NamedTuple):
    """Something that lasted.

    Attributes:
        name: what.
        kind: a step of the optimizer, a phase of it, a wait for other ranks, or the work of a helper thread.
        thread: name of the thread.
        start_ns, stop_ns: when, by `time.monotonic_ns` of this node.
    """

    name: str
    kind: Kind
    thread: str
    start_ns: int
    stop_ns: int


class Spans:
    """Collects from the moment it is made; any thread may add, as appending to a list needs no lock.

    Args:
        quiet: a phase that is not worth a word.
    """

    def __init__(self, quiet: str = ""):
        self.found: list[Span] = []
        self._quiet = quiet
        self._since_ns = time.monotonic_ns()

    def end_phase(self, phase: str) -> None:
        """A phase ends, and the next one begins. Phases are of the process, told by one thread at a time."""
        now_ns = time.monotonic_ns()
        if phase != self._quiet:
            self.found.append(Span(phase, "phase", threading.main_thread().name, self._since_ns, now_ns))
        self._since_ns = now_ns

    def add(self, name: str, kind: Kind, start_ns: int) -> int:
        """This thread did something from then to now, which is returned."""
        stop_ns = time.monotonic_ns()
        self.found.append(Span(name, kind, threading.current_thread().name, start_ns, stop_ns))
        return stop_ns
