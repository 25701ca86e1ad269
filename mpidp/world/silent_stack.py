"""A process of this node that does not answer comes in; what it does in its Python code, or in the kernel, goes out.

A rank inside a library that holds Python's lock can run no thread of ours. But its handler of a signal writes the
stacks, in C, to a file in its memory, which a neighbour reads.
"""

import faulthandler
import os
import signal
import time
from dataclasses import dataclass

from mpidp.world.process_state import RUNS, STOPPED, process_state

SIGNAL = signal.SIGRTMAX - 3  # one that no launcher or library is known to use
WRITING_S = 0.3
MOST_BYTES = 4000


@dataclass(frozen=True)
class Address:
    """How a neighbour finds a process: its number, that of its open file, -1 for none, and the file's inode.

    Only a process that has this very file open has the handler; for any other the signal would be the end.
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
    """What a neighbour sees: why a process is silent, with its stack if it can still tell, and if it does nothing."""

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
