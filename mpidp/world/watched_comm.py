"""A communicator in, one whose blocking calls say that this rank waits out. What it makes is watched as well."""

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

from mpidp.world import communicators
from mpidp.world.mpi import MPI
from mpidp.world.status import status

# The blocking calls that this package makes, or may come to make.
NAMES = (
    *("barrier", "Barrier", "bcast", "Bcast", "gather", "Gather", "Gatherv", "scatter", "Scatter", "Scatterv"),
    *("allgather", "Allgather", "Allgatherv", "alltoall", "Alltoall", "Alltoallv"),
    *("reduce", "Reduce", "allreduce", "Allreduce", "Reduce_scatter", "Reduce_scatter_block", "scan", "exscan"),
    *("recv", "Recv", "sendrecv", "Sendrecv"),
)


class WatchedComm(MPI.Intracomm):
    """`WatchedComm(comm)` is another name for the same communicator: to free one is to free both."""

    def Dup(self, info: MPI.Info | None = None) -> "WatchedComm":  # noqa: N802  # MPI's name
        """The duplicate is watched, too. Collective."""
        return _opened(WatchedComm(super().Dup(info)))

    def Split(self, color: int = 0, key: int = 0) -> "WatchedComm":  # noqa: N802
        """The parts are watched, too. Collective."""
        return _opened(WatchedComm(super().Split(color, key)))

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> "WatchedComm":  # noqa: N802
        """The parts are watched, too. Collective."""
        return _opened(WatchedComm(super().Split_type(split_type, key, info)))

    def Free(self) -> None:  # noqa: N802
        """Gives it back. Collective."""
        communicators.closed(self)
        super().Free()


def _opened(comm: WatchedComm) -> WatchedComm:
    communicators.opened(comm)
    return comm


def _watched(name: str) -> Callable[..., Any]:
    call = cast(Callable[..., Any], getattr(MPI.Intracomm, name))

    @wraps(call)
    def method(self: WatchedComm, *args: Any, **kwargs: Any) -> Any:
        with status.waiting(name, self.size):
            return call(self, *args, **kwargs)

    return method


for _name in NAMES:
    setattr(WatchedComm, _name, _watched(_name))
