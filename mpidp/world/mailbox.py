"""Messages between ranks that are sent and received without waiting.

A thread of its own uses this while the main thread may be inside a call of MPI, which therefore must have been started
with MPI_THREAD_MULTIPLE.
"""

import threading
from dataclasses import dataclass
from typing import Any

from mpidp.world.mpi import MPI

SHUT_TIMEOUT_S = 1.0
MOST_OPEN = 4  # messages on their way to one rank: to one that is stopped they do not arrive


@dataclass(frozen=True)
class Message:
    """From rank to rank. Kinds: beat, watched, ask, look, answer."""

    kind: str
    sender: int
    content: Any


class Mailbox:
    """Sends and receives. Construction is collective.

    Args:
        comm: the ranks; it is duplicated.
    """

    def __init__(self, comm: MPI.Intracomm):
        self.comm = MPI.Intracomm(comm.Dup())
        self._open: dict[int, list[MPI.Request]] = {}
        self._sent = [0] * comm.size
        self._received = 0
        self._use = threading.Lock()
        self._is_shut = False

    def send(self, rank: int, message: Message) -> bool:
        """Sends without waiting; False if too many messages to that rank are on their way still."""
        with self._use:
            if self._is_shut:
                return False
            requests = [request for request in self._open.get(rank, []) if not request.Test()]
            self._open[rank] = requests
            if len(requests) >= MOST_OPEN:
                return False
            requests.append(self.comm.isend(message, dest=rank))
            self._sent[rank] += 1
            return True

    def received(self) -> list[Message]:
        """What has arrived."""
        messages: list[Message] = []
        with self._use:
            while not self._is_shut and (message := self.comm.improbe()) is not None:
                messages.append(message.recv())
        self._received += len(messages)
        return messages

    def shut(self) -> None:
        """From here on nothing is sent or received: MPI may be aborted, which takes it apart under our hands."""
        self._use.acquire(timeout=SHUT_TIMEOUT_S)  # kept: another thread may be in there for ever
        self._is_shut = True

    def close(self) -> None:
        """Takes in all messages and gives the communicator back. Collective; nobody may send any more."""
        expected = sum(sent[self.comm.rank] for sent in self.comm.allgather(self._sent))
        while self._received < expected:
            self.received()
        for requests in self._open.values():
            MPI.Request.Waitall(requests)
        self.comm.Free()
