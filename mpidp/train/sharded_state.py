"""Runs of elements: which shard has which of a parameter, and the optimizer's state, split by runs and joined again.

All parameters, one after the other, are cut into as many shards as there are ranks. A parameter is cut only after a
multiple of `BLOCK` elements, so that vector kernels compute each element as they would in the whole parameter.

The state of a parameter in `torch.optim` is, by name: tensors of the parameter's shape, of which a run has its part in
one dimension; and numbers that are the same for all its elements, such as the count of steps.

Nothing here uses MPI: a plan of a run and the export of a checkpoint need it on login nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from mpidp.errors import MpidpError

T = TypeVar("T")

BLOCK = 64  # elements; at least as many as any vector kernel of torch takes at once


def flat(tensor: Tensor) -> Tensor:
    """All elements in one dimension: a view if they are dense in memory, in any order, else a copy."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda axis: -strides[axis])
    transposed = tensor.permute(order)
    return transposed.view(-1) if transposed.is_contiguous() else tensor.reshape(-1)


def flat_like(tensor: Tensor, model: Tensor) -> Tensor:
    """All elements in one dimension, in the memory order of another tensor of its shape."""
    alike = tensor.stride() == model.stride() or (tensor.is_contiguous() and model.is_contiguous())
    return flat(tensor if alike else torch.empty_like(model, dtype=tensor.dtype, device=tensor.device).copy_(tensor))


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


def _is_dense(parameter: Tensor) -> bool:
    """Whether its elements fill a contiguous range of memory, in any order."""
    if parameter.layout is not torch.strided:
        return False
    lay = flat(parameter.detach())
    return lay.data_ptr() == parameter.data_ptr() and lay.is_contiguous()


# The optimizers of torch.optim that update each element independently of the others.
ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")


def check_divisible(optimizer: torch.optim.Optimizer) -> None:
    """Checks that an optimizer updates each element by itself, and that its parameters can be cut into shards.

    Raises:
        MpidpError: why it cannot be sharded, and what to do.
    """
    kind = type(optimizer)
    is_known = kind.__module__.startswith("torch.optim.") and kind.__name__ in ELEMENTWISE
    if not is_known and not getattr(kind, "elementwise", False):
        raise MpidpError(
            f"{kind.__qualname__} cannot be sharded: its step may mix the elements of a parameter. Use one of "
            f"{', '.join(ELEMENTWISE)}; a class of your own promises the contrary by an attribute elementwise = True"
        )
    if getattr(optimizer.step, "_wrapped_by_lr_sched", False):
        raise MpidpError("a scheduler holds the optimizer to be sharded: make it afterwards, over the sharded one")
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        if not _is_dense(parameter):
            raise MpidpError(
                f"parameter {number} of shape {tuple(parameter.shape)} does not lie densely in memory (strides "
                f"{tuple(parameter.stride()) if parameter.layout is torch.strided else parameter.layout}), and cannot "
                f"be sharded: make it contiguous"
            )


State = dict[str, Any]
Part = tuple[Run, State]

# What torch.optim keeps one of for a whole parameter. (All is without dimensions where the parameter is.)
_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})


def cut(state: State, parameter: Tensor, run: Run) -> State:
    """The state of a run, copied from that of its whole parameter.

    Raises:
        MpidpError: the state holds a tensor that is neither a number nor of the parameter's shape.
    """
    return {name: _cut(name, value, parameter, run) for name, value in state.items()}


def join(run: Run, parts: Iterable[Part]) -> State:
    """The state of a run, from those of runs that together cover it; {} where these are empty.

    Raises:
        MpidpError: a part holds a tensor that is neither a number nor of its run's length.
    """
    joined: State = {}
    for other, state in parts:
        common = overlap(run, other)
        if common is None:
            continue
        for name, value in state.items():
            if not _is_cut(value):
                joined[name] = value.clone() if isinstance(value, Tensor) else value
                continue
            if value.numel() != other.numel:
                raise _uncuttable(name, value, f"{other.numel} elements")
            if name not in joined:
                joined[name] = torch.empty(run.numel, dtype=value.dtype, device=value.device)
            joined[name][place(common, run)].copy_(value[place(common, other)])
    return joined


def _whole(parameter: Tensor, number: int, parts: list[Part]) -> State:
    """The state of a whole parameter, as plain torch has it; a single part is taken as it is, not copied."""
    run, shape, strides = Run(number, 0, parameter.numel()), parameter.shape, parameter.stride()
    joined = parts[0][1] if [part[0] for part in parts] == [run] else join(run, parts)
    # Dense, and in the order of memory.
    return {name: torch.as_strided(each, shape, strides) if _is_cut(each) else each for name, each in joined.items()}


def select(run: Run, part: Part) -> Part | None:
    """Views of the elements of a run in a part."""
    common = overlap(run, part[0])
    if common is None:
        return None
    inside = place(common, part[0])
    return common, {name: value[inside] if _is_cut(value) else value for name, value in part[1].items()}


def run_of(part: Part) -> Run:
    """The run whose state it is."""
    return part[0]


def to_host(state: State) -> State:
    """The same in host memory, each tensor with memory of its own."""
    return {name: value.detach().cpu().clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def full_state_dict(groups: Sequence[dict[str, Any]], parameters: Sequence[Tensor], parts: Sequence[Part]) -> State:
    """The plain `state_dict`, of packed param_groups and parts; parameters give shapes and strides."""
    found = by_parameter(parts, run_of)
    states = {number: _whole(parameters[number], number, found.pop(number)) for number in sorted(found)}
    return {"state": {number: state for number, state in states.items() if state}, "param_groups": list(groups)}


def _cut(name: str, value: Any, parameter: Tensor, run: Run) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.shape == parameter.shape and not (value.dim() == 0 and name in _NUMBERS):
        return flat_like(value, parameter)[run.start : run.stop].clone()
    if value.dim() == 0:
        return value.clone()
    raise _uncuttable(name, value, f"a parameter of shape {tuple(parameter.shape)}")


def _uncuttable(name: str, value: Tensor, what: str) -> MpidpError:
    return MpidpError(
        f"the optimizer's state {name!r} has shape {tuple(value.shape)} for {what}, and cannot be cut into shards. "
        f"Use the optimizer without sharding."
    )


def _is_cut(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1


# Keys that a plain optimizer's state does not have: over how many ranks it was sharded, and of each parameter shape and
# strides, as elements are cut in the order in which they lie in memory.
RANKS, SHAPES = "ranks", "shapes"

SavedPart = tuple[int, int, int, dict[str, Any]]  # parameter, start, stop, state
ReadRank = Callable[[int], list[SavedPart]]


def plain_state(saved: dict[str, Any], read: ReadRank) -> dict[str, Any]:
    """The `state_dict` that the plain optimizer would have; `saved` itself if it is of a plain one."""
    if RANKS not in saved:
        return saved
    parts = [part for rank in range(saved[RANKS]) for part in to_parts(read(rank))]
    return full_state_dict(saved["param_groups"], like(saved), parts)


def like(saved: dict[str, Any]) -> list[Tensor]:
    """The parameters as tensors without memory."""
    return [torch.empty_strided(shape, strides, device="meta") for shape, strides in saved[SHAPES]]


def to_parts(saved: Iterable[SavedPart]) -> list[Part]:
    """A rank's own state, as runs with their state."""
    return [(Run(parameter, start, stop), state) for parameter, start, stop, state in saved]
