"""Communicators whose blocking calls the watchdog sees, and their handling when a rank dies.

MPI's user-level failure mitigation (ULFM, in the MPI standard's terms: process fault tolerance) turns the death of a
rank into an error of the calls that need it. Open MPI 5 has it when `mpiexec --with-ft ulfm` starts the job.
A rank that leaves a collective for that reason must free the ranks that wait for it, in any call on any communicator:
so all open communicators are registered here, and are revoked at the same time.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, TypeVar, cast

from mpidp.world import mpi
from mpidp.world.mpi import MPI
from mpidp.world.status import status

T = TypeVar("T", bound=MPI.Comm)
_open: dict[int, MPI.Comm] = {}
_users: list[weakref.ref[object]] = []
_kept: list[object] = []


def opened(comm: T) -> T:
    """Registers a new communicator, and returns it."""
    _open[id(comm)] = comm
    return comm


def closed(comm: MPI.Comm) -> None:
    """Removes a communicator that is about to be freed."""
    _open.pop(id(comm), None)


def know_of_loss() -> bool:
    """Whether a rank of an open communicator has died, or another rank has revoked one. Not collective."""
    there = [comm for comm in [*_open.values()] if comm != MPI.COMM_NULL]
    return any(comm.Is_revoked() or _num_failed(comm) for comm in there)


def _num_failed(comm: MPI.Comm) -> int:
    failed = comm.Get_failed()
    number = failed.size
    if failed != MPI.GROUP_EMPTY:
        failed.Free()
    return number


def keep_at_loss(*users: object) -> None:
    """Registers objects into whose memory messages may still be received, by weak references; see `forget_all`."""
    _users[:] = [user for user in _users if user() is not None]
    _users.extend(map(weakref.ref, users))


def revoke_all() -> None:
    """Revokes all open communicators: calls on them fail on all ranks, also those in progress. Not collective."""
    for comm in [*_open.values()]:
        if comm != MPI.COMM_NULL:
            comm.Revoke()


def forget_all() -> None:
    """Removes all communicators without freeing them, which would need all their ranks. Not collective.

    Their registered users stay in memory until the next loss of a rank: a message may still arrive there.
    """
    _open.clear()
    kept = [alive for user in _users if (alive := user()) is not None]
    _users.clear()
    if kept:  # else one more rank was lost before anything was made anew
        _kept[:] = kept


# Set by Open MPI's launcher; the library reads it as well.
FT_VARIABLE = "OMPI_MCA_mpi_ft_enable"
FT_LIBRARY = "Open MPI v5"

_is_elastic = False


def why_not(environment: Mapping[str, str], library: str, ends_mpi: bool) -> str:
    """The reason why a job cannot go on without a rank, or "" if it can. Pure.

    Args:
        environment: of this process.
        library: version text of the MPI library.
        ends_mpi: whether this package ends MPI.
    """
    name = library.splitlines()[0].strip("\0 ") if library else "this MPI"
    if not library.startswith(FT_LIBRARY):
        return f"{name} does not survive the death of a rank; Open MPI 5 does, under `mpiexec --with-ft ulfm`"
    if environment.get(FT_VARIABLE, "").lower() not in ("1", "true", "yes"):
        return f"{name} was started without fault tolerance; start the job with `mpiexec --with-ft ulfm`"
    if not ends_mpi:
        return "mpi4py was imported before mpidp, and its end of MPI waits for dead ranks; import mpidp first"
    return ""


def be_elastic() -> None:
    """Lets the job go on after the death of a rank, from now on. Not collective.

    `MPI_Finalize` is then never called: it sometimes waits for ever for a rank that died at any time before.
    """
    global _is_elastic
    _is_elastic = True
    mpi.never_end()


def is_elastic() -> bool:
    """Whether this process goes on when another rank dies."""
    return _is_elastic


def is_loss(error: BaseException) -> bool:
    """Whether an exception, or one in its chain, is MPI's for the death of a rank or a revoked communicator."""
    classes = MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED
    return any(isinstance(one, MPI.Exception) and one.Get_error_class() in classes for one in _chain(error))


def is_survived(error: BaseException) -> bool:
    """Whether an exception comes from the death of a rank after which this process goes on.

    Some of Open MPI's collectives (Alltoall) raise an error of another class then, so any error of MPI counts if MPI
    knows of a death.
    """
    return _is_elastic and (is_loss(error) or (any(map(_is_of_mpi, _chain(error))) and know_of_loss()))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def _is_of_mpi(error: BaseException) -> bool:
    return isinstance(error, MPI.Exception)


# The blocking calls that this package makes, or may come to make.
NAMES = (
    *("barrier", "Barrier", "bcast", "Bcast", "gather", "Gather", "Gatherv", "scatter", "Scatter", "Scatterv"),
    *("allgather", "Allgather", "Allgatherv", "alltoall", "Alltoall", "Alltoallv"),
    *("reduce", "Reduce", "allreduce", "Allreduce", "Reduce_scatter", "Reduce_scatter_block", "scan", "exscan"),
    *("recv", "Recv", "sendrecv", "Sendrecv"),
)


class WatchedComm(MPI.Intracomm):
    """A communicator with watched calls. `WatchedComm(comm)` shares the handle of `comm`: freeing one frees both."""

    def Dup(self, info: MPI.Info | None = None) -> "WatchedComm":  # noqa: N802  # MPI's name
        """The duplicate is watched, too. Collective."""
        return opened(WatchedComm(super().Dup(info)))

    def Split(self, color: int = 0, key: int = 0) -> "WatchedComm":  # noqa: N802
        """The parts are watched, too. Collective."""
        return opened(WatchedComm(super().Split(color, key)))

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> "WatchedComm":  # noqa: N802
        """The parts are watched, too. Collective."""
        return opened(WatchedComm(super().Split_type(split_type, key, info)))

    def Free(self) -> None:  # noqa: N802
        """Frees the communicator. Collective; in elastic jobs it stays allocated, as one of its ranks may be dead."""
        closed(self)
        if not is_elastic():
            super().Free()


def _watched(name: str) -> Callable[..., Any]:
    call = cast(Callable[..., Any], getattr(MPI.Intracomm, name))

    @wraps(call)
    def method(self: WatchedComm, *args: Any, **kwargs: Any) -> Any:
        with status.waiting(name, self.size):
            return call(self, *args, **kwargs)

    return method


for _name in NAMES:
    setattr(WatchedComm, _name, _watched(_name))
