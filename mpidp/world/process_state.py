"""The number of a process of this node in; why it may not answer out, as the kernel sees it."""

from pathlib import Path

RUNS = ("R", "S")  # states in which a process takes signals
STOPPED = ("T", "Z", "X")  # states in which it does nothing, and will not by itself
_STATES = {
    "T": "its process is stopped (SIGSTOP, or the scheduler suspended it)",
    "t": "its process is stopped by a debugger",
    "D": "its process waits in the kernel for a device or a file system",
    "Z": "its process has ended",
    "X": "its process has ended",
    "R": "its process computes in a call that holds Python's lock",
    "S": "its process sleeps in a call that holds Python's lock",
}


def process_state(pid: int) -> tuple[str, str]:
    """The kernel's letter for the state of a process of this node, and what it means, in words."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "X", _STATES["X"]
    letter = text.rpartition(")")[2].split()[0]
    return letter, _STATES.get(letter, f"its process is in state {letter}")
