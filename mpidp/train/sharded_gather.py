"""Gathering of parameters of which each rank has updated its own shard: by messages or shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mpidp.reduce.transport import MAX_PIECE_BYTES
from mpidp.train.sharded_state import Part, Run, State, by_parameter, join, select, sources, to_host
from mpidp.world import mpi
from mpidp.world.mpi import MPI
from mpidp.world.rank_memory import SharedWindow
from mpidp.world.world import World

# The pieces of all ranks in sum: large enough for the full bandwidth, small enough to stay in the caches of a CPU.
TOTAL_BYTES = 4 << 20
LEAST_PIECE_BYTES = 64 << 10
# Elements sent at once: their state is copied to the host, and each rank keeps its share.
PIECE = 1 << 22


class Messages:
    """Gathers one piece after the other by MPI's Allgatherv.

    The buffer is in device memory if MPI can be given that, else in host memory.

    Args:
        world: the ranks.
        piece_bytes: most bytes of one rank in one piece.
    """

    def __init__(self, world: World, piece_bytes: int):
        self.piece_bytes = piece_bytes
        self._comm = world.comm
        on_gpu = world.device.type == "cuda"
        on_device = on_gpu and world.cuda_aware.aware
        self._device = world.device
        self._buffer = torch.empty(
            piece_bytes * world.size,
            dtype=torch.uint8,
            device=world.device if on_device else "cpu",
            pin_memory=on_gpu and not on_device,
        )

    def segments(self, counts: Sequence[int]) -> Sequence[Tensor]:
        """The bytes of each rank in this piece, uint8, at least as many as `counts`; this rank fills its own."""
        starts = accumulate(counts, initial=0)
        return [self._buffer[start : start + count] for start, count in zip(starts, counts, strict=False)]

    def exchange(self, counts: Sequence[int]) -> None:
        """Gathers what all ranks wrote to their segments. Collective; `counts` is the same on all ranks."""
        if self._device.type == "cuda":  # copies to the buffer, and from it for the piece before, are done after this
            torch.cuda.current_stream(self._device).synchronize()
        buffer = self._buffer if self._buffer.is_cuda else self._buffer.numpy()
        self._comm.Allgatherv(MPI.IN_PLACE, [buffer, (list(counts), None), MPI.BYTE])

    def close(self) -> None:
        """Does nothing: there is nothing to free."""


class Window:
    """As `Messages`, but in shared memory of a node: each byte is written once and read by the ranks that need it.

    A segment has two halves, used in turn: while some ranks still read one piece, others write the next.

    Args:
        world: the ranks, all on one node.
        piece_bytes: most bytes of one rank in one piece.

    Raises:
        OSError: on all ranks, they cannot share memory here.
    """

    def __init__(self, world: World, piece_bytes: int):
        self.piece_bytes = piece_bytes
        self._window = SharedWindow(world.topology.node_comm, 2 * piece_bytes)
        self._half = 0

    def segments(self, counts: Sequence[int]) -> Sequence[Tensor]:
        """The current half."""
        start = self._half * self.piece_bytes
        return [segment[start : start + self.piece_bytes] for segment in self._window.segments]

    def exchange(self, counts: Sequence[int]) -> None:
        """Waits for all ranks, which have then read the piece before last in this half. Collective."""
        self._window.synchronize()
        self._half = 1 - self._half

    def close(self) -> None:
        """Not collective."""
        self._window.free()


Channel = Messages | Window


def make_channel(world: World) -> Channel:
    """The faster way here: shared memory if all ranks are on one node and compute on the CPU. Collective."""
    piece_bytes = max(LEAST_PIECE_BYTES, TOTAL_BYTES // world.size)
    if world.num_nodes == 1 and world.size > 1 and world.device.type == "cpu" and not mpi.is_elastic():
        try:
            return Window(world, piece_bytes)
        except OSError as error:  # on all ranks of the node, which are all there are
            world.log_once(f"the ranks cannot share memory ({error}): parameters go by messages, which is slower")
    return Messages(world, min(piece_bytes, MAX_PIECE_BYTES // world.size))


@dataclass(frozen=True)
class _Piece:
    """What is gathered at once: the bytes of some runs of each rank."""

    counts: list[int]
    sizes: list[list[int]]
    views: list[list[Tensor]]


class Gather:
    """Gathers all parameters from the ranks that have updated them. Calling it is collective, making it is not.

    Args:
        rank: of this process.
        lists: for each rank the runs that it updates; each element once.
        flats: the memory of each parameter in one dimension.
        channel: transports the bytes.
    """

    def __init__(self, rank: int, lists: Sequence[Sequence[Run]], flats: Sequence[Tensor], channel: Channel):
        self._rank = rank
        self._channel = channel
        itemsizes = [flat.element_size() for flat in flats]
        cut = [pieces(runs, itemsizes, channel.piece_bytes) for runs in lists]
        self._pieces = [
            _make([of_rank[number] if number < len(of_rank) else [] for of_rank in cut], flats)
            for number in range(max(map(len, cut)))
        ]

    def __call__(self) -> None:
        """Collective."""
        with torch.no_grad():
            for piece in self._pieces:
                segments = self._channel.segments(piece.counts)
                parts = [
                    torch.split(segment[:count], sizes)
                    for segment, count, sizes in zip(segments, piece.counts, piece.sizes, strict=True)
                ]
                _copy(parts[self._rank], piece.views[self._rank])
                self._channel.exchange(piece.counts)
                for rank, views in enumerate(piece.views):
                    if rank != self._rank:
                        _copy(views, parts[rank])


def pieces(runs: Sequence[Run], itemsizes: Sequence[int], piece_bytes: int) -> list[list[Run]]:
    """Cuts runs into lists of at most `piece_bytes` bytes each. Pure.

    Args:
        runs: in the order in which they are sent.
        itemsizes: bytes of an element of each parameter.
        piece_bytes: at least one element's.
    """
    lists: list[list[Run]] = []
    room = 0
    for run in runs:
        start, itemsize = run.start, itemsizes[run.parameter]
        while start < run.stop:
            if room < itemsize:
                lists.append([])
                room = piece_bytes
            stop = min(run.stop, start + room // itemsize)
            lists[-1].append(Run(run.parameter, start, stop))
            room -= (stop - start) * itemsize
            start = stop
    return lists


def bytes_of(flat: Tensor, run: Run) -> Tensor:
    """The memory of a run, uint8."""
    part = flat[run.start : run.stop]
    return (torch.view_as_real(part).view(-1) if part.is_complex() else part).view(torch.uint8)


def _make(runs_of_ranks: Sequence[Sequence[Run]], flats: Sequence[Tensor]) -> _Piece:
    views = [[bytes_of(flats[run.parameter], run) for run in runs] for runs in runs_of_ranks]
    sizes = [[view.numel() for view in of_rank] for of_rank in views]
    return _Piece([sum(of_rank) for of_rank in sizes], sizes, views)


def _copy(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(values), non_blocking=True)


def collect(
    comm: MPI.Intracomm,
    numels: Sequence[int],
    held: Sequence[Part],
    wanted: Sequence[Run],
    flats: Sequence[Tensor] | None = None,
) -> list[State]:
    """Broadcasts the state of all elements, once, piece by piece. Collective.

    Every rank receives all of it, and keeps little: used after a loss of ranks, and for saving, not in every step.

    Args:
        comm: the ranks.
        numels: elements of each parameter.
        held: the parts that this rank has; several ranks may have the same.
        wanted: the runs that it needs.
        flats: the memory of the parameters, to broadcast their elements as well; None for state only.

    Returns:
        The state of each wanted run, in host memory.

    Raises:
        LookupError: on all ranks, with the first run that no rank holds.
    """
    lists: list[list[Run]] = comm.allgather([run for run, _ in held])
    found: dict[Run, list[Part]] = {run: [] for run in wanted}
    of_parameter = by_parameter(found, lambda run: run)
    for source in sources(numels, lists, PIECE):
        message: tuple[State, Tensor | None] | None = None
        if source.rank == comm.rank:
            part = select(source.run, held[source.index])
            assert part is not None
            message = to_host(part[1]), None if flats is None else bytes_of(flats[part[0].parameter], part[0]).cpu()
        state, values = comm.bcast(message, root=source.rank)
        if flats is not None and values is not None and source.rank != comm.rank:
            bytes_of(flats[source.run.parameter], source.run).copy_(values)
        for run in of_parameter.get(source.run.parameter, []):
            part = select(run, (source.run, state))
            if part is not None:
                found[run].append(part)
    return [join(run, found.pop(run)) for run in wanted]
