"""The function `init`: starts MPI, chooses devices, and checks on every rank what would fail later."""

import os
import socket

import torch

from mpidp.errors import LaunchError
from mpidp.world.collectives import share_error
from mpidp.world.device import Awareness, decide, device_uuid, probe_in_child, set_device, shared_gpu
from mpidp.world.exit import AbortGuard
from mpidp.world.launch import cannot_share, cannot_start, current_world, launch_facts, set_current_world, size_mismatch
from mpidp.world.library import library_hint, mapped, missing_gtl, read_maps, thread_level, two_libraries
from mpidp.world.log import log_to_stderr
from mpidp.world.mpi import MPI, WatchedComm, cores_per_rank, make_topology, reduced, warn_of_cores
from mpidp.world.rank_memory import forget_names
from mpidp.world.watchdog import Watchdog, watch_rank
from mpidp.world.world import World

# Autograd runs the end of a CUDA backward pass in its own thread while the training thread waits, and that is where
# gradients are reduced: MPI must accept calls from different threads, one at a time.
REQUIRED_THREAD_LEVEL = MPI.THREAD_SERIALIZED


def init(
    comm: MPI.Intracomm | None = None,
    *,
    share_gpu: bool = False,
    stall_warning_s: float | None = None,
    stall_abort_s: float | None = None,
) -> World:
    """Starts MPI if it does not run yet, and returns the `World` of this process. Collective at the first call.

    Another call returns the same World. Without a launcher its size is 1. From the first call on an uncaught exception
    on any rank ends the whole job, and so does a rank that leaves while others wait for it.

    A program whose ranks do different things splits them itself; the failure of one still ends the whole job:

        from mpi4py import MPI  # before mpidp, so that it starts MPI

        trains = MPI.COMM_WORLD.rank % 4 != 0
        group = MPI.COMM_WORLD.Split(int(trains))
        if trains:
            world = mpidp.init(group)

    Args:
        comm: the ranks that train together, which all call this with it; all of the job when None. It is duplicated.
        share_gpu: allow two ranks of a node to use one GPU (also `MPIDP_SHARE_GPU=1`).
        stall_warning_s: seconds that ranks wait for others before a report says which are missing, and where each is; 0
            for no report. None is 60, or the value of an earlier call.
        stall_abort_s: seconds before the job is ended, likewise; None is 600.

    Raises:
        LaunchError: an earlier call was given other ranks; MPI has another size than the launcher intended; its thread
            level is too low; two MPI libraries are loaded; two local ranks share a GPU; some ranks have a GPU and
            others none; /dev/shm is too small for MPI to start.

    Warns:
        UserWarning: on rank 0, ranks have more threads than cores, or are pinned to the same few.
    """
    world = current_world()
    if world is None:
        _start_mpi()
        world = _make_world(comm or MPI.COMM_WORLD, share_gpu or os.environ.get("MPIDP_SHARE_GPU") == "1")
        set_current_world(world)
    elif comm is not None and MPI.Comm.Compare(comm, world.comm) not in (MPI.IDENT, MPI.CONGRUENT):
        raise LaunchError(
            "mpidp.init() was called before with another communicator; a process has one World: give the same, or none"
        )
    if world.watchdog is not None:
        world.watchdog.configure(stall_warning_s, stall_abort_s)
    return world


def _start_mpi() -> None:
    """Starts MPI, or raises LaunchError for what would end it in a way that nobody can catch."""
    libraries = mapped(read_maps())
    fault = two_libraries(libraries.mpi) or missing_gtl(os.environ.get("MPICH_GPU_SUPPORT_ENABLED"), libraries)
    if fault is not None:
        raise LaunchError(fault)
    facts = launch_facts(os.environ)
    if not MPI.Is_initialized():
        text = MPI.Get_library_version()
        stops = cannot_start(facts, os.environ, text) or cannot_share(text, facts.local_size, os.environ)
        if stops is not None:
            raise LaunchError(stops)
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    library = MPI.Get_library_version().splitlines()[0].strip("\0 ")
    if MPI.Query_thread() < REQUIRED_THREAD_LEVEL:
        raise LaunchError(
            f"MPI was started with {thread_level()}, mpidp needs MPI_THREAD_SERIALIZED "
            f"or more ({library}). Call mpidp.init() before anything else starts MPI, or start it with "
            f"MPI.Init_thread(MPI.THREAD_MULTIPLE)."
        )
    mismatch = size_mismatch(facts, MPI.COMM_WORLD.size, library)
    if mismatch is not None:
        raise LaunchError(mismatch)


def _make_world(ranks: MPI.Intracomm, share_gpu: bool) -> World:
    comm = WatchedComm(ranks.Dup())
    node_comm = comm.Split_type(MPI.COMM_TYPE_SHARED)
    forget_names(node_comm)
    topology = make_topology(comm)
    host = socket.gethostname()
    guard = AbortGuard(comm.rank, comm.size, host)
    log_to_stderr(guard)
    watchdog: Watchdog | None = None
    if comm.size > 1:
        guard.install()
        watchdog = watch_rank(comm, host, topology.node, guard)
    warn_of_cores(comm, host, torch.get_num_threads(), stacklevel=4)
    device = set_device(node_comm.rank)
    _check_same_kind(comm, device, host)
    if not share_gpu:
        share_error(comm, shared_gpu(node_comm.allgather(device_uuid(device)), host), f"on {host}, choosing devices")
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
    """Raises on every rank when some see a GPU and some do not: they would reduce differently; collective."""
    kinds = comm.allgather((device.type, host))
    different = next((kind for kind in kinds if kind[0] != kinds[0][0]), None)
    if different is not None:
        error = LaunchError(
            f"rank 0 on {kinds[0][1]} computes on {kinds[0][0]}, rank {kinds.index(different)} on {different[1]} on "
            f"{different[0]}: a node does not see its GPUs. Look at CUDA_VISIBLE_DEVICES and nvidia-smi there."
        )
        share_error(comm, error, "choosing devices")


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
