"""A number of every rank in; whether all gave the same one out, later, without waiting for it."""

from contextlib import suppress

import numpy as np

from mpidp.world.agreement import PAUSE_S
from mpidp.world.mpi import MPI
from mpidp.world.waiting import wait


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

    def abandon(self) -> None:
        """Lets go of an open message after the communicator was revoked, because a rank died. Not collective."""
        if self._request is not None:
            with suppress(MPI.Exception):
                wait(self._request, PAUSE_S)
            self._request = None
