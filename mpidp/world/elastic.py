"""Loss of ranks: an agreement of all ranks in each step, and a new `World` of those that are left.

All ranks that are left call `shrink`, each out of another call: the first one revokes every communicator, so that the
others' calls fail, too. What they agree on afterwards holds for all of them, also when more ranks die meanwhile.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from mpidp.printable import listed
from mpidp.world import mpi
from mpidp.world.launch import set_current_world
from mpidp.world.mpi import MPI, WatchedComm, cores_per_rank, is_loss, is_survived, make_topology
from mpidp.world.watchdog import ABORT_S, watch_rank
from mpidp.world.world import World

log = logging.getLogger("mpidp.rank")


@dataclass(frozen=True)
class Member:
    """A rank as it was numbered when the job began, and the name of its node."""

    rank: int
    host: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"


@dataclass(frozen=True)
class LostRanks:
    """The ranks that died between two steps; and the seconds from when this rank noticed until all could go on."""

    members: tuple[Member, ...]
    num_left: int
    seconds: float

    def __str__(self) -> str:
        left = "1 rank goes on" if self.num_left == 1 else f"{self.num_left} ranks go on"
        return f"lost {listed(self.members)}; {left}, after {self.seconds:.3f} s"


class ElasticWorld:
    """The ranks that are alive, and how they agree on that. Construction is collective.

    Attributes:
        world: the ranks that are left, in a World of their own after each loss; what was made with a former one is
            useless then.
        members: the ranks of `world`, in order, as they were numbered at the start.

    Args:
        world: the ranks at the start.
    """

    def __init__(self, world: World):
        self.world = world
        self.members: list[Member] = world.comm.allgather(Member(world.rank, world.host))
        self._comm = world.comm  # of those that are known to live, while `world` may still be one of more ranks
        self._has_disagreed = False  # on this communicator: all that live are, or will be, in `shrink`
        mpi.opened(world.comm)

    def agree(self) -> None:
        """Returns, on all ranks, when all came here alive. Collective.

        Raises:
            mpi4py.MPI.Exception: on all ranks, a rank has died or another one is in `shrink`, which must follow here.
        """
        with self.world.status.waiting("Agree", self.world.size):
            if not self._vote(True):
                raise MPI.Exception(MPI.ERR_PROC_FAILED)

    def shrink(self) -> list[Member]:
        """Makes a new World without the ranks that died; returns these. Collective over those that live, from anywhere.

        Afterwards `world` is a new one, which is also what `mpidp.init()` returns.
        """
        before = self.members
        with self._end_job_if_late():
            while True:
                mpi.revoke_all()
                mpi.forget_all()
                # Others may wait in `agree`, which revoking does not end: this vote ends it.
                if not self._has_disagreed:
                    self._vote(False)
                comm = _shrunk(self._comm)
                self.members = [self.members[rank] for rank in _former_ranks(comm, self._comm)]
                self._comm, self._has_disagreed = comm, False
                try:
                    self.world = _make_world(self.world, comm)
                except MPI.Exception as error:
                    if not is_survived(error):
                        raise
                    log.info("one more rank was lost while the communicators were made anew")
                    continue
                set_current_world(self.world)
                return [member for member in before if member not in self.members]

    def _vote(self, flag: bool) -> bool:
        """Whether all vote for it and none has died; the same answer on all. Collective; not after an answer of no."""
        assert not self._has_disagreed
        try:
            is_agreed = bool(self._comm.Agree(int(flag)))
        except MPI.Exception as error:
            if not is_loss(error):
                raise
            is_agreed = False
        self._has_disagreed = not is_agreed
        return is_agreed

    @contextmanager
    def _end_job_if_late(self) -> Iterator[None]:
        """Ends the job when the block takes too long: there is no watchdog meanwhile, and a rank may hang."""
        guard, watchdog = self.world.guard, self.world.watchdog
        limit_s = ABORT_S if watchdog is None else watchdog.abort_s
        if not limit_s:
            yield
            return

        text = (
            f"a rank was lost, and after {limit_s:g} s (stall_abort_s) the others have not all come to go on without "
            f"it: the job ends."
        )
        timer = threading.Timer(limit_s, guard.end_job, (text, 1))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _make_world(before: World, comm: WatchedComm) -> World:
    """The World of the ranks that are left. Collective over them."""
    node_comm = comm.Split_type(MPI.COMM_TYPE_SHARED)
    topology = make_topology(comm)
    before.guard.renumber(comm.rank, comm.size)
    return replace(
        before,
        rank=comm.rank,
        size=comm.size,
        local_rank=node_comm.rank,
        local_size=node_comm.size,
        node=topology.node,
        num_nodes=topology.num_nodes,
        cores=cores_per_rank(node_comm),
        comm=comm,
        node_comm=node_comm,
        topology=topology,
        watchdog=before.watchdog and watch_rank(comm, before.host, topology.node, before.guard, before.watchdog),
    )


def agreed(comm: MPI.Intracomm, flag: bool) -> bool:
    """Whether the flag is set on every rank that lives, the same answer on all of them. Works while ranks die."""
    while True:
        comm.Ack_failed()
        try:
            return bool(comm.Agree(int(flag)))
        except MPI.Exception as error:  # raised on all ranks, when another death becomes known
            if not is_loss(error):
                raise


def _shrunk(comm: MPI.Intracomm) -> WatchedComm:
    """The communicator of those that live. Collective over them."""
    while True:
        small: WatchedComm | None = None
        try:
            small = WatchedComm(comm.Shrink())
        except MPI.Exception as error:
            if not is_loss(error):
                raise
        # All take the new one or none does: the next loss must find everybody on the same.
        if agreed(comm, small is not None):
            assert small is not None
            return mpi.opened(small)


def _former_ranks(comm: MPI.Intracomm, before: MPI.Intracomm) -> list[int]:
    """Of each rank of `comm`, its rank in the communicator it was shrunk from."""
    group, former = comm.Get_group(), before.Get_group()
    ranks = [int(rank) for rank in group.Translate_ranks(list(range(comm.size)), former)]
    group.Free()
    former.Free()
    return ranks
