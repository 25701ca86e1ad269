"""A started rank in; everything that watches it, while it works and when it leaves, at work out."""

from mpidp.world.abort import AbortGuard
from mpidp.world.departure import Departure
from mpidp.world.mpi import MPI
from mpidp.world.scalar import reduced
from mpidp.world.status import START, status
from mpidp.world.terminated import Terminated
from mpidp.world.watchdog import Watchdog

_departures: list[Departure] = []


def watch_rank(comm: MPI.Intracomm, host: str, node: int, guard: AbortGuard) -> Watchdog:
    """Starts the watchdog of this rank, and what ends the job at a signal. Collective.

    Args:
        comm: the ranks.
        host: this rank's node.
        node: number of this rank's node.
        guard: ends the job.
    """
    guard.where = _where
    may_talk = bool(reduced(comm, MPI.Query_thread() == MPI.THREAD_MULTIPLE, MPI.LAND))
    Terminated(guard)
    watchdog = Watchdog(comm, host, node, guard, may_talk)
    guard.before_abort, status.announce = watchdog.silence, watchdog.announce
    _departures.append(Departure(watchdog, guard))
    return watchdog


def watch_again(
    before: Watchdog | None, comm: MPI.Intracomm, host: str, node: int, guard: AbortGuard
) -> Watchdog | None:
    """A watchdog of those that are left, when ranks have died, in the place of the one before. Collective.

    Args:
        before: the watchdog of more ranks; None where there was none, and will be none.
        comm: the ranks, as in `watch_rank`.
        host: likewise.
        node: likewise.
        guard: likewise.
    """
    if before is None:
        return None
    before.abandon()
    watchdog = Watchdog(comm, host, node, guard, may_talk=before.post is not None)
    watchdog.configure(before.warning_s, before.abort_s)
    guard.before_abort, status.announce = watchdog.silence, watchdog.announce
    for departure in _departures:
        departure.watchdog = watchdog
    return watchdog


def _where() -> str:
    """Step and phase, once there has been one."""
    return "" if status.phase == START and status.step == 0 else f"{status.where()}: "
