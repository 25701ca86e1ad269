"""A started process in, its World out: rank, node, device, and a few collective helpers on a private communicator.

Every method that says "collective" must be called by all ranks, in the same order.
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch

from mpidp.errors import LaunchError
from mpidp.world.abort import AbortGuard
from mpidp.world.awareness import Awareness, decide, library_hint, probe_in_child
from mpidp.world.cores import cores_per_rank, warn_of_cores
from mpidp.world.device import check_not_shared, device_uuid, set_device
from mpidp.world.launch import cannot_start, launch_facts, size_mismatch
from mpidp.world.mapped import mapped, missing_gtl, two_libraries
from mpidp.world.maps import MAPS
from mpidp.world.mpi import MPI
from mpidp.world.scalar import reduced
from mpidp.world.shared_error import share_error
from mpidp.world.shared_files import forget_names
from mpidp.world.status import Status, status
from mpidp.world.topology import Topology, make_topology
from mpidp.world.watch import watch_rank
from mpidp.world.watchdog import Watchdog
from mpidp.world.watched_comm import WatchedComm

T = TypeVar("T")
log = logging.getLogger("mpidp")

# Autograd runs the end of a CUDA backward pass in its own thread while the training thread waits, and that is where
# gradients are reduced: MPI must accept calls from different threads, one at a time.
REQUIRED_THREAD_LEVEL = MPI.THREAD_SERIALIZED
POLL_S = 0.0005
_THREAD_LEVELS = {
    MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE",
    MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
    MPI.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
    MPI.THREAD_MULTIPLE: "MPI_THREAD_MULTIPLE",
}


@dataclass(frozen=True)
class World:
    """The ranks of this job, seen from one of them.

    Attributes:
        rank, size: this process among all.
        local_rank, local_size: this process among those on its node.
        node, num_nodes: number of this node, and of all; nodes are numbered by their lowest rank.
        host: name of this node.
        device: where this rank computes.
        cores: this rank's share of the cores it may run on.
        cuda_aware: whether MPI may be given this device's memory, and why.
        comm: mpidp's own duplicate of MPI.COMM_WORLD; its traffic never mixes with the user's.
        node_comm: the ranks of this node.
        topology: the communicators that gradients are reduced on.
        guard: ends the job when this rank fails.
        watchdog: reports ranks that keep the others waiting; None where there is one rank.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    num_nodes: int
    host: str
    device: torch.device
    cores: int
    cuda_aware: Awareness
    comm: MPI.Intracomm = field(repr=False)
    node_comm: MPI.Intracomm = field(repr=False)
    topology: Topology = field(repr=False)
    guard: AbortGuard = field(repr=False)
    watchdog: Watchdog | None = field(default=None, repr=False)

    @property
    def status(self) -> Status:
        """What this process is doing: step and phase, for messages and for the watchdog."""
        return status

    @property
    def threads_may_call(self) -> bool:
        """Whether MPI takes calls from several threads at once (MPI_THREAD_MULTIPLE)."""
        return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on some rank. Collective."""
        return bool(reduced(self.comm, bool(flag), MPI.LOR))

    def all(self, flag: bool) -> bool:
        """Whether the flag is set on every rank. Collective."""
        return bool(reduced(self.comm, bool(flag), MPI.LAND))

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over ranks, in float64, of a list of equal length on every rank. Collective."""
        sums = torch.tensor(list(values), dtype=torch.float64)
        self.comm.Allreduce(MPI.IN_PLACE, sums.numpy(), op=MPI.SUM)
        return cast(list[float], sums.tolist())

    def sum_on_node(self, value: int) -> int:
        """The sum of an integer over the ranks of this node. Collective on the node."""
        return reduced(self.node_comm, value, MPI.SUM)

    def mean(self, value: float, weight: float = 1.0) -> float:
        """The mean over ranks, weighted. A rank with weight 0 adds nothing, even if its value is NaN. Collective.

        Raises:
            ValueError: the weights of all ranks sum to 0.
        """
        total, weights = self.sum([value * weight if weight else 0.0, weight])
        if weights == 0:
            raise ValueError("mean over ranks whose weights sum to 0: no rank has anything to average")
        return total / weights

    def broadcast(self, obj: T | None) -> T:
        """Rank 0's object, on every rank. Collective; for small objects (it is pickled)."""
        return cast(T, self.comm.bcast(obj, root=0))

    def barrier(self, timeout_s: float | None = None) -> None:
        """Waits until every rank is here. Collective.

        It polls with short sleeps, so that waiting ranks leave the cores to the working ones.

        Raises:
            TimeoutError: after `timeout_s` seconds some rank had not come; the job should end then.
        """
        request = self.comm.Ibarrier()
        start = time.monotonic()
        with status.waiting("barrier", self.size):
            while not request.Test():
                if timeout_s is not None and time.monotonic() - start > timeout_s:
                    raise TimeoutError(
                        f"barrier: rank {self.rank} on {self.host} waited {timeout_s} s; some rank did not come"
                    )
                time.sleep(POLL_S)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A block whose exception on any rank is raised on every rank. Collective, at the end of the block.

        The block must not hold collectives that a failing rank would miss. All ranks raise the exception of the
        lowest failing rank, with a note that names that rank.

        Args:
            what: what the block does, for the note, e.g. "opening the data".
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        share_error(self.comm, error, f"on rank {self.rank} of {self.size} ({self.host}), {what}")

    def from_root(self, function: Callable[[], T]) -> T:
        """Rank 0 calls the function; its result, or its exception, reaches every rank. Collective."""
        result: T | None = None
        with self.together("for all ranks"):
            if self.rank == 0:
                result = function()
        return self.broadcast(result)

    def say(self, text: str) -> None:
        """One line from the job: rank 0 prints it, the other ranks do not. Not collective."""
        if self.rank == 0:
            print(f"mpidp: {text}", flush=True)


_world: World | None = None


def init(*, share_gpu: bool = False, stall_warning_s: float | None = None, stall_abort_s: float | None = None) -> World:
    """Starts MPI if needed and returns this process's World. Idempotent. Collective at the first call.

    Without a launcher this is a world of size 1. From here on an uncaught exception on any rank ends the whole job,
    and so does a rank that leaves while others wait for it.

    Args:
        share_gpu: allow two ranks of a node to use one GPU (also `MPIDP_SHARE_GPU=1`).
        stall_warning_s: how long ranks wait for others before a report says for whom, and where each is; 0 for ever.
            None is 60 s, or what an earlier call said.
        stall_abort_s: how long before the job is ended, likewise; None is 600 s.

    Raises:
        LaunchError: MPI has another size than the launcher meant; MPI's thread level is too low; two MPI libraries
            are loaded; two local ranks share a GPU.

    Warns:
        UserWarning: on rank 0, ranks have more threads than cores, or are pinned to the same few.
    """
    global _world
    if _world is None:
        _start_mpi()
        _world = _make_world(share_gpu or os.environ.get("MPIDP_SHARE_GPU") == "1")
    if _world.watchdog is not None:
        _world.watchdog.configure(stall_warning_s, stall_abort_s)
    return _world


def current() -> World | None:
    """The World that `init` made in this process, or None. Starts nothing."""
    return _world


def _start_mpi() -> None:
    _check_loaded()
    if not MPI.Is_initialized():
        stops = cannot_start(launch_facts(os.environ), os.environ, MPI.Get_library_version())
        if stops is not None:
            raise LaunchError(stops)
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    level = MPI.Query_thread()
    library = MPI.Get_library_version().splitlines()[0].strip("\0 ")
    if level < REQUIRED_THREAD_LEVEL:
        raise LaunchError(
            f"MPI was started with {_THREAD_LEVELS[level]}, mpidp needs {_THREAD_LEVELS[REQUIRED_THREAD_LEVEL]} "
            f"or more ({library}). Call mpidp.init() before anything else starts MPI, or start it with "
            f"MPI.Init_thread(MPI.THREAD_MULTIPLE)."
        )
    mismatch = size_mismatch(launch_facts(os.environ), MPI.COMM_WORLD.size, library)
    if mismatch is not None:
        raise LaunchError(mismatch)


def _check_loaded() -> None:
    """Raises LaunchError for libraries that would crash MPI, in a way that nobody can catch. Not collective."""
    libraries = mapped(MAPS.read_text() if MAPS.exists() else "")
    fault = two_libraries(libraries.mpi) or missing_gtl(os.environ.get("MPICH_GPU_SUPPORT_ENABLED"), libraries)
    if fault is not None:
        raise LaunchError(fault)


def _make_world(share_gpu: bool) -> World:
    comm = WatchedComm(MPI.COMM_WORLD.Dup())
    node_comm = comm.Split_type(MPI.COMM_TYPE_SHARED)
    forget_names(node_comm)
    topology = make_topology(comm)
    host = socket.gethostname()
    guard = AbortGuard(comm.rank, comm.size, host, MPI.COMM_WORLD.Abort)
    watchdog: Watchdog | None = None
    if comm.size > 1:
        guard.install()
        watchdog = watch_rank(comm, host, topology.node, guard)
    warn_of_cores(comm, host, torch.get_num_threads(), stacklevel=4)
    device = set_device(node_comm.rank)
    _check_same_kind(comm, device, host)
    if not share_gpu:
        _check_not_shared(comm, node_comm, device, host)
    return World(
        rank=comm.rank,
        size=comm.size,
        local_rank=node_comm.rank,
        local_size=node_comm.size,
        node=topology.node,
        num_nodes=topology.num_nodes,
        host=host,
        device=device,
        cores=cores_per_rank(node_comm),
        cuda_aware=_decide_awareness(comm, node_comm, device),
        comm=comm,
        node_comm=node_comm,
        topology=topology,
        guard=guard,
        watchdog=watchdog,
    )


def _check_same_kind(comm: MPI.Intracomm, device: torch.device, host: str) -> None:
    """Raises on every rank when some see a GPU and some do not: they would take different ways; collective."""
    kinds = comm.allgather((device.type, host))
    different = next((kind for kind in kinds if kind[0] != kinds[0][0]), None)
    if different is not None:
        error = LaunchError(
            f"rank 0 on {kinds[0][1]} computes on {kinds[0][0]}, rank {kinds.index(different)} on {different[1]} on "
            f"{different[0]}: the GPUs of one node are not seen. Look at CUDA_VISIBLE_DEVICES and nvidia-smi there."
        )
        share_error(comm, error, "choosing devices")


def _check_not_shared(comm: MPI.Intracomm, node_comm: MPI.Intracomm, device: torch.device, host: str) -> None:
    """Raises on every rank of every node when two ranks of some node hold one GPU; collective."""
    uuids = node_comm.allgather(device_uuid(device))
    error: LaunchError | None = None
    try:
        check_not_shared(uuids, host)
    except LaunchError as caught:
        error = caught
    share_error(comm, error, f"on {host}, choosing devices")


def _decide_awareness(comm: MPI.Intracomm, node_comm: MPI.Intracomm, device: torch.device) -> Awareness:
    """One answer for all ranks, proven once a node; collective."""
    if not reduced(comm, device.type == "cuda", MPI.LOR):
        return Awareness(False, "no rank has a GPU")
    own: Awareness | None = None
    error: LaunchError | None = None
    if node_comm.rank == 0 and device.type == "cuda":
        try:
            own = decide(os.environ, library_hint(), lambda: probe_in_child(str(device)))
        except LaunchError as caught:
            error = caught
    share_error(comm, error, "choosing how MPI gets gradients")
    answers: list[Awareness] = [answer for answer in comm.allgather(own) if answer is not None]
    return next((answer for answer in answers if not answer.aware), answers[0])
