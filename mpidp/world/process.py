"""A process of some node in; whether it still runs, seen from here, out. Needs neither MPI nor torch."""

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from mpidp.world.process_state import STOPPED, process_state

# A process that cannot be seen from here is taken for dead when its files were not touched for so long. File servers
# may tell of a change a minute late.
SILENT_S = 180.0
_TEXT = re.compile(r"(\d+)\.(\d+)\.(\d+)\.(.+)", re.ASCII)
_START = 19  # of the fields of /proc/PID/stat behind the name


@dataclass(frozen=True)
class Process:
    """A process as nothing else is: numbers are used again, but not with the same time of start.

    Attributes:
        pid: its number, in its own container.
        started: when it started, in ticks since the node did.
        namespace: of process numbers; another one in another container.
        host: the name of its node.
    """

    pid: int
    started: int
    namespace: int
    host: str

    @classmethod
    def this(cls) -> "Process":
        """The one that asks."""
        return cls(os.getpid(), _started(os.getpid()) or 0, _namespace(), socket.gethostname())

    @classmethod
    def parse(cls, text: str) -> "Process | None":
        """The process whose `str` this is; None for another text."""
        match = _TEXT.fullmatch(text)
        return cls(int(match[1]), int(match[2]), int(match[3]), match[4]) if match else None

    def __str__(self) -> str:
        return f"{self.pid}.{self.started}.{self.namespace}.{self.host}"

    def is_running(self) -> bool | None:
        """Whether it runs; None where that cannot be seen: on another node, in another container."""
        if (self.host, self.namespace) != (socket.gethostname(), _namespace()):
            return None
        return _started(self.pid) == self.started and process_state(self.pid)[0] not in STOPPED[1:]


def _started(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_START])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
