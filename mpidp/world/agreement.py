"""Questions that all ranks answer one call later: the greatest of their numbers, and whether all are equal.

The message travels while the next step computes, so that asking at every step costs a call and no waiting.
"""

import numpy as np

from mpidp.world.collectives import wait
from mpidp.world.communicators import keep_at_loss
from mpidp.world.mpi import MPI

PAUSE_S = 1e-4  # between two looks, where a rank is late: the core may be wanted by it


class DelayedMaximum:
    """The maximum over ranks of what each gave at the previous call. Making one is collective.

    Args:
        comm: the ranks; it is duplicated, so that an open message never meets other traffic.
    """

    def __init__(self, comm: MPI.Intracomm):
        self._comm = comm.Dup() if comm.size > 1 else None
        self._given = np.zeros(1, dtype=np.int64)
        self._greatest = np.zeros(1, dtype=np.int64)
        self._request: MPI.Request | None = None
        keep_at_loss(self)

    def exchange(self, value: int) -> int:
        """Gives this rank's number; returns the greatest of the previous call, 0 at the first. Collective.

        With one rank there is nobody to wait for: its own number, at once.
        """
        if self._comm is None:
            return value
        before = self._finish()
        self._given[0] = value
        self._request = self._comm.Iallreduce(self._given, self._greatest, op=MPI.MAX)
        return before

    def close(self) -> None:
        """Waits for the open message and gives the communicator back. Collective."""
        if self._comm is not None:
            self._finish()
            self._comm.Free()
            self._comm = None

    def _finish(self) -> int:
        if self._request is None:
            return 0
        wait(self._request, PAUSE_S)
        self._request = None
        return int(self._greatest[0])


class DelayedEquality:
    """Whether all ranks gave equal numbers. Making one is collective.

    Args:
        comm: the ranks; it is duplicated.
    """

    def __init__(self, comm: MPI.Intracomm):
        self._comm = comm.Dup()
        self._given = np.zeros(2, dtype=np.int64)
        self._greatest = np.zeros(2, dtype=np.int64)
        self._request: MPI.Request | None = None
        keep_at_loss(self)

    def give(self, value: int) -> None:
        """Sends this rank's number (64 bits, signed) on its way. Collective; the one before must have been asked for.

        The greatest of all numbers and of all their complements are each other's only if all are equal.
        """
        assert self._request is None
        self._given[:] = value, ~value
        self._request = self._comm.Iallreduce(self._given, self._greatest, op=MPI.MAX)

    def differ(self) -> bool:
        """Whether the numbers given last differ; False when none was given since. The same on all ranks."""
        if self._request is None:
            return False
        wait(self._request, PAUSE_S)
        self._request = None
        return bool(self._greatest[0] != ~self._greatest[1])

    def close(self) -> None:
        """Waits for the open message and gives the communicator back. Collective."""
        self.differ()
        self._comm.Free()
