"""Messages between ranks that are sent and received without waiting.

Used by a thread while the main thread may be inside a call of MPI, so MPI must have been started with
MPI_THREAD_MULTIPLE.
"""

import threading
from dataclasses import dataclass
from typing import Any

from mpidp.world.mpi import MPI

SHUT_TIMEOUT_S = 1.0
MOST_OPEN = 4  # messages to one rank that it has not received, as it does not while it is stopped


@dataclass(frozen=True)
class Message:
    """A message from rank to rank. Kinds: heartbeat, watched, ask, look, answer."""

    kind: str
    sender: int
    content: Any


class Mailbox:
    """Sends and receives messages. Construction is collective.

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
        """Sends without waiting; False if too many messages to that rank have not been received yet."""
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
        """The messages that have arrived since the last call."""
        messages: list[Message] = []
        with self._use:
            while not self._is_shut and (message := self.comm.improbe()) is not None:
                messages.append(message.recv())
        self._received += len(messages)
        return messages

    def shut(self) -> None:
        """Ends sending and receiving for good, before MPI is aborted by another thread."""
        self._use.acquire(timeout=SHUT_TIMEOUT_S)  # never released: another thread may be blocked in there
        self._is_shut = True

    def close(self) -> None:
        """Receives what was sent and frees the communicator. Collective; no rank may send any more."""
        expected = sum(sent[self.comm.rank] for sent in self.comm.allgather(self._sent))
        while self._received < expected:
            self.received()
        for requests in self._open.values():
            MPI.Request.Waitall(requests)
        self.comm.Free()
