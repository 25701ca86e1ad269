"""Communicators as this package makes them in; all that are open out, so that they can be revoked together.

A rank that leaves a collective because another one died must free those that wait for itself, in whatever call on
whatever communicator they are.
"""

from mpidp.world.mpi import MPI

_open: dict[int, MPI.Comm] = {}


def opened(comm: MPI.Comm) -> None:
    """A communicator was made."""
    _open[id(comm)] = comm


def closed(comm: MPI.Comm) -> None:
    """It is about to be given back."""
    _open.pop(id(comm), None)


def know_of_loss() -> bool:
    """Whether MPI knows that a rank of one of them has died, or another rank has revoked one. Not collective."""
    there = [comm for comm in [*_open.values()] if comm != MPI.COMM_NULL]
    return any(comm.Is_revoked() or _num_failed(comm) for comm in there)


def _num_failed(comm: MPI.Comm) -> int:
    failed = comm.Get_failed()
    number = failed.size
    if failed != MPI.GROUP_EMPTY:
        failed.Free()
    return number


def revoke_all() -> None:
    """Makes every call on them fail, on all ranks, those that already wait included. Not collective."""
    for comm in [*_open.values()]:
        if comm != MPI.COMM_NULL:
            comm.Revoke()


def forget_all() -> None:
    """They stay allocated: to free a communicator needs all its ranks. Not collective."""
    _open.clear()
