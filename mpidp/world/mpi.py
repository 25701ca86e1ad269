"""MPI: mpi4py's module, imported without starting MPI; its end; communicators that the watchdog sees; topology.

This package ends MPI, unless mpi4py was imported before it. mpi4py holds Python's lock in `MPI_Finalize`, so no Python
thread could limit its time: faulthandler's thread, which is not a Python thread, does.

MPI's user-level failure mitigation (ULFM, in the MPI standard's terms: process fault tolerance) turns the death of a
rank into an error of the calls that need it. Open MPI 5 has it when `mpiexec --with-ft ulfm` starts the job.
A rank that leaves a collective for that reason must free the ranks that wait for it, in any call on any communicator:
so all open communicators are registered here, and are revoked at the same time.
"""

import atexit
import faulthandler
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import mpi4py
import numpy as np

from mpidp.errors import LaunchError
from mpidp.world.status import status
from mpidp.world.system import Pinned, crowded, too_few_cores

STDERR = 2  # the descriptor: `sys.stderr` may be closed by now
MOST_S = 1e9  # faulthandler takes no more; thirty years


@contextmanager
def last_wait(timeout_s: float) -> Iterator[None]:
    """A context manager: a block that takes longer than so many seconds ends the process with 1; 0 for no limit.

    A process has one such timer: one that the user's program had set is cancelled. Not collective.
    """
    if timeout_s:
        faulthandler.dump_traceback_later(min(timeout_s, MOST_S), exit=True, file=STDERR)
    try:
        yield
    finally:
        if timeout_s:
            faulthandler.cancel_dump_traceback_later()


mpi4py.rc.initialize = False  # mpidp.init() starts MPI, so that an import on a login node does not
# A program that imported mpi4py first has decided how MPI ends.
ENDS_MPI = "mpi4py.MPI" not in sys.modules
mpi4py.rc.finalize = not ENDS_MPI

try:
    from mpi4py import MPI as MPI
except RuntimeError as error:  # what mpi4py raises when it finds no library to load
    raise LaunchError(
        f"mpi4py cannot load an MPI library ({error}). On a cluster load its MPI module; on your own machine "
        f"`pip install mpich`; or name the library's file in MPI4PY_LIBMPI."
    ) from error

_process = os.getpid()
_before_end: list[Callable[[], float]] = []
_is_elastic = False


def before_end(function: Callable[[], float]) -> None:
    """Has a function called at exit, before MPI ends; it returns how many seconds that end may take, 0 for no limit."""
    if ENDS_MPI:
        _before_end.append(function)
    else:
        atexit.register(function)


def _finalize() -> None:
    """Ends MPI at exit, after all functions that were registered since this package was imported."""
    timeout_s = max((function() for function in _before_end), default=0.0)
    # A forked child runs this too, but MPI belongs to its parent.
    if not _is_elastic and os.getpid() == _process and MPI.Is_initialized() and not MPI.Is_finalized():
        with last_wait(timeout_s):
            MPI.Finalize()


if ENDS_MPI:
    atexit.register(_finalize)


T = TypeVar("T", bound=MPI.Comm)
_open: dict[int, MPI.Comm] = {}
_users: list[weakref.ref[object]] = []
_kept: list[object] = []


def opened(comm: T) -> T:
    """Registers a new communicator, and returns it."""
    _open[id(comm)] = comm
    return comm


def _know_of_loss() -> bool:
    """Whether a rank of an open communicator has died, or another rank has revoked one."""
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


def why_not(environment: Mapping[str, str], library: str, ends_mpi: bool) -> str:
    """The reason why a job with this `library` (its version text) cannot go on without a rank, or "". Pure."""
    name = library.splitlines()[0].strip("\0 ") if library else "this MPI"
    if not library.startswith("Open MPI v5"):
        return f"{name} does not survive the death of a rank; Open MPI 5 does, under `mpiexec --with-ft ulfm`"
    # Set by Open MPI's launcher; the library reads it as well.
    if environment.get("OMPI_MCA_mpi_ft_enable", "").lower() not in ("1", "true", "yes"):
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
    is_of_mpi = any(isinstance(one, MPI.Exception) for one in _chain(error))
    return _is_elastic and (is_loss(error) or (is_of_mpi and _know_of_loss()))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


# The blocking calls that this package makes, or may come to make.
_NAMES = (
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
        _open.pop(id(self), None)
        if not _is_elastic:
            super().Free()


def _watched(name: str) -> Callable[..., Any]:
    call = cast(Callable[..., Any], getattr(MPI.Intracomm, name))

    @wraps(call)
    def method(self: WatchedComm, *args: Any, **kwargs: Any) -> Any:
        with status.waiting(name, self.size):
            return call(self, *args, **kwargs)

    return method


for _name in _NAMES:
    setattr(WatchedComm, _name, _watched(_name))


def reduced(comm: MPI.Intracomm, value: int, op: MPI.Op) -> int:
    """Reduces one integer (64 bits) over the ranks, by an operation of MPI's. Collective.

    Not `comm.allreduce`: mpi4py does that by messages on a communicator of its own, which cannot be revoked. When a
    rank has died, one that waits there for a living rank that has left for `shrink` would wait for ever.
    """
    number = np.array([value], dtype=np.int64)
    comm.Allreduce(MPI.IN_PLACE, number, op=op)
    return int(number[0])


@dataclass(frozen=True)
class Topology:
    """Communicators of their own, so that a helper thread's reductions never meet the training thread's calls.

    Attributes:
        comm: all ranks.
        node_comm: the ranks of this node.
        cross_comm: the ranks with this rank's local rank, one a node; None on ranks beyond the smallest node.
        min_local_size: the smallest number of ranks on a node, and so how many `cross_comm`s there are.
        max_local_size: the largest number of ranks on a node.
        num_nodes: number of nodes.
        node: number of this node; nodes are numbered by their lowest rank.
    """

    comm: MPI.Intracomm
    node_comm: MPI.Intracomm
    cross_comm: MPI.Intracomm | None
    min_local_size: int
    max_local_size: int
    num_nodes: int
    node: int

    def free(self) -> None:
        """Gives the communicators back. Collective."""
        for comm in (self.cross_comm, self.node_comm, self.comm):
            if comm is not None:
                comm.Free()


def make_topology(comm: MPI.Intracomm) -> Topology:
    """Makes them. Collective."""
    own = comm.Dup()
    node_comm = cast(MPI.Intracomm, own.Split_type(MPI.COMM_TYPE_SHARED))
    min_local_size = reduced(own, node_comm.size, MPI.MIN)
    max_local_size = reduced(own, node_comm.size, MPI.MAX)
    has_peers = node_comm.rank < min_local_size
    cross_comm = cast(MPI.Intracomm, own.Split(node_comm.rank if has_peers else MPI.UNDEFINED, own.rank))
    # The first cross-node communicator has the lowest rank of each node, in order of rank.
    node, num_nodes = node_comm.bcast((cross_comm.rank, cross_comm.size) if node_comm.rank == 0 else None, root=0)
    return Topology(own, node_comm, cross_comm if has_peers else None, min_local_size, max_local_size, num_nodes, node)


def cores_per_rank(node_comm: MPI.Intracomm) -> int:
    """Return this rank's share of its cores, at least 1. Collective on the node.

    Ranks that a launcher pinned to cores of their own have those; ranks that may all run anywhere share.
    """
    cores = os.sched_getaffinity(0)
    sharing = sum(bool(cores & other) for other in node_comm.allgather(cores))
    return max(1, len(cores) // sharing)


def warn_of_cores(comm: MPI.Intracomm, host: str, threads: int, stacklevel: int) -> None:
    """Warns once, on rank 0, when the `threads` that ranks compute with get in each other's way. Collective.

    `stacklevel` says whose line the warning names, as `warnings.warn` has it for this function's caller.
    """
    ranks = comm.gather(Pinned(host, frozenset(os.sched_getaffinity(0)), threads), root=0)
    if ranks is None:
        return
    for text in (too_few_cores(ranks), crowded(ranks, os.cpu_count() or 1)):
        if text is not None:
            warnings.warn(text, stacklevel=stacklevel)
