"""Offsets of the nodes' clocks from rank 0's.

F. Cristian's algorithm (Probabilistic clock synchronization, Distributed Computing 3, 1989): the other clock is taken
to be read half-way between question and answer; of several answers the quickest counts, whose error is at most half of
its round trip.
"""

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from mpidp.world.mpi import MPI

if TYPE_CHECKING:
    from mpidp.world.world import World

QUESTIONS = 32
TAG = 7001  # on the library's own communicator, where nothing else travels point to point meanwhile


@dataclass(frozen=True)
class Reading:
    """A comparison of this node's clock, at `at_ns`, with another one, which is ahead by `offset_ns` +- `error_ns`."""

    at_ns: int
    offset_ns: int
    error_ns: int


def read_clock(world: "World", now_ns: Callable[[], int] = time.monotonic_ns) -> Reading:
    """Compares the nodes' clocks: the first rank of each asks rank 0, one after the other. Collective.

    Takes some round trips for each node. Ranks of one node share its monotonic clock.
    """
    asks = world.local_rank == 0 and world.rank != 0
    askers = [rank for rank in world.comm.allgather(world.rank if asks else 0) if rank]
    if world.rank == 0:
        for rank in askers:
            answer(world.comm, rank, now_ns)
    reading = ask(world.comm, 0, now_ns) if asks else Reading(now_ns(), 0, 0)
    shared: Reading = world.node_comm.bcast(reading, root=0)
    return shared


def clock_offsets(comm: MPI.Intracomm) -> list[float]:
    """Seconds by which each node's clock is ahead of rank 0's, by node; [] on other ranks than 0. Collective.

    These are the clocks that files and logs are dated by. Nodes are numbered by their lowest rank.
    """
    node_comm = cast(MPI.Intracomm, comm.Split_type(MPI.COMM_TYPE_SHARED))
    leader: int = node_comm.bcast(comm.rank, root=0)
    node_comm.Free()
    offsets_s: list[float] = []
    for asked in sorted(set(comm.allgather(leader))):
        if comm.rank == 0:
            offsets_s.append(0.0 if asked == 0 else ask(comm, asked, time.time_ns).offset_ns / 1e9)
        elif comm.rank == asked:
            answer(comm, 0, time.time_ns)
    return offsets_s


def answer(comm: MPI.Intracomm, rank: int, now_ns: Callable[[], int]) -> None:
    """Answers a rank that is in `ask` with the time of this clock."""
    message = array("q", [0])
    for _ in range(QUESTIONS):
        comm.Recv(message, rank, TAG)
        message[0] = now_ns()
        comm.Send(message, rank, TAG)


def ask(comm: MPI.Intracomm, rank: int, now_ns: Callable[[], int]) -> Reading:
    """Compares this clock with that of a rank that is in `answer`."""
    message = array("q", [0])
    best: Reading | None = None
    for _ in range(QUESTIONS):
        start_ns = now_ns()
        comm.Send(message, rank, TAG)
        comm.Recv(message, rank, TAG)
        stop_ns = now_ns()
        middle_ns, error_ns = (start_ns + stop_ns) // 2, (stop_ns - start_ns) // 2
        if best is None or error_ns < best.error_ns:
            best = Reading(middle_ns, message[0] - middle_ns, error_ns)
    assert best is not None
    return best


def rank_0_ns(ns: int, first: Reading, last: Reading) -> int:
    """Converts a time of this node to rank 0's clock, between two readings: clocks drift by microseconds a second."""
    span_ns = last.at_ns - first.at_ns
    if span_ns <= 0:
        return ns + first.offset_ns
    drift_ns = (last.offset_ns - first.offset_ns) * (ns - first.at_ns) // span_ns
    return ns + first.offset_ns + drift_ns
