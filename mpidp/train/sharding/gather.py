"""Parameters of which each rank has brought its own shard up to date in; the whole of them, on all ranks, out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpidp.train.sharding.channel import Channel
from mpidp.train.sharding.layout import Run


@dataclass(frozen=True)
class _Piece:
    """What is carried at once: of each rank the bytes of some of its runs."""

    counts: list[int]
    sizes: list[list[int]]
    views: list[list[Tensor]]


class Gather:
    """Knows where everything lies. Not collective to make; calling it is.

    Args:
        rank: of this process.
        lists: of each rank the runs that it brings up to date; of all elements once.
        flats: the memory of each parameter in one dimension.
        channel: carries the bytes.
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
        runs: in the order in which they travel.
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
