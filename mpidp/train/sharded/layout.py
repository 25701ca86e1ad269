"""The layout of shards: which elements of which parameter belong to which. Pure arithmetic.

All parameters, one after the other, are cut into as many shards as there are ranks. A parameter is cut only after a
multiple of `BLOCK` elements, so that vector kernels compute each element as they would in the whole parameter.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

BLOCK = 64  # elements; at least as many as any vector kernel of torch takes at once


@dataclass(frozen=True, order=True)
class Run:
    """Elements [start, stop) of a parameter, in the order of memory; parameters are numbered."""

    parameter: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Source:
    """A run, and where to get it: it is part of the run number `index` that `rank` holds."""

    run: Run
    rank: int
    index: int


def shards(numels: Sequence[int], count: int) -> list[list[Run]]:
    """Cuts parameters into `count` lists of runs, of equally many blocks or one less.

    Args:
        numels: elements of each parameter.
        count: how many shards; some are empty where there are fewer blocks.
    """
    blocks = [-(-numel // BLOCK) for numel in numels]
    total = sum(blocks)
    edges = [total * shard // count for shard in range(count + 1)]
    lists: list[list[Run]] = [[] for _ in range(count)]
    first, shard = 0, 0  # block at which the parameter begins, shard in which it does
    for parameter, (numel, length) in enumerate(zip(numels, blocks, strict=True)):
        block = first
        while block < first + length:
            while edges[shard + 1] <= block:
                shard += 1
            stop = min(first + length, edges[shard + 1])
            lists[shard].append(Run(parameter, (block - first) * BLOCK, min(numel, (stop - first) * BLOCK)))
            block = stop
        first += length
    return lists


def holders(nodes: Sequence[int], copies: int) -> list[tuple[int, ...]]:
    """For each shard the ranks that hold it; the first is its owner, and has the number of the shard.

    With two copies each rank holds two shards. The other holder is on another node wherever a fixed distance between
    the two allows it, so that the loss of a node loses no shard.

    Args:
        nodes: the node of each rank.
        copies: 1 or 2.
    """
    size = len(nodes)
    if copies == 1 or size == 1:
        return [(rank,) for rank in range(size)]

    def num_apart(distance: int) -> int:
        return sum(nodes[rank] != nodes[(rank + distance) % size] for rank in range(size))

    distance = max(range(1, size), key=num_apart)  # the first of equal ones: a neighbour
    return [(rank, (rank + distance) % size) for rank in range(size)]


def sources(numels: Sequence[int], held: Sequence[Sequence[Run]], piece: int) -> list[Source]:
    """Where to get every element, once each, in order, in runs of at most `piece` elements.

    Args:
        numels: elements of each parameter.
        held: for each rank the runs it holds; they may overlap, and be cut in any way.
        piece: longest run.

    Raises:
        LookupError: elements that no rank holds; its argument is the first such run.
    """
    of_parameter: list[list[Source]] = [[] for _ in numels]
    for rank, runs in enumerate(held):
        for index, run in enumerate(runs):
            of_parameter[run.parameter].append(Source(run, rank, index))
    return [
        source
        for parameter, numel in enumerate(numels)
        for source in _cover(parameter, numel, of_parameter[parameter], piece)
    ]


def _cover(parameter: int, numel: int, held: Sequence[Source], piece: int) -> Iterator[Source]:
    start = 0
    while start < numel:
        here = [source for source in held if source.run.start <= start < source.run.stop]
        if not here:
            stop = min((source.run.start for source in held if source.run.start > start), default=numel)
            raise LookupError(Run(parameter, start, stop))
        best = max(here, key=lambda source: source.run.stop)
        stop = min(best.run.stop, start + piece)
        yield Source(Run(parameter, start, stop), best.rank, best.index)
        start = stop


def by_parameter(items: Iterable[T], run_of: Callable[[T], Run]) -> dict[int, list[T]]:
    """Runs, or what has one, of each parameter, in their order."""
    found: dict[int, list[T]] = {}
    for item in items:
        found.setdefault(run_of(item).parameter, []).append(item)
    return found


def place(run: Run, within: Run) -> slice:
    """Where a run lies in another that holds it."""
    return slice(run.start - within.start, run.stop - within.start)


def overlap(one: Run, other: Run) -> Run | None:
    """The common elements of two runs; None if there are none."""
    start, stop = max(one.start, other.start), min(one.stop, other.stop)
    return Run(one.parameter, start, stop) if one.parameter == other.parameter and start < stop else None
