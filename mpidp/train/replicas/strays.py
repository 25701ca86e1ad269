"""Sums over the bits of tensors on all ranks in; which ranks have gone astray, in what and how to cure it, out."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mpidp.train.bits import flat
from mpidp.train.broadcast import broadcast_tensor
from mpidp.world.world import World

MOST_NAMED = 8


@dataclass(frozen=True)
class Strays:
    """A tensor that is not the same on all ranks.

    Attributes:
        name: which.
        root: the lowest rank that holds what most ranks do; None if no majority holds the same.
        ranks: those that hold something else than the majority, or all.
    """

    name: str
    root: int | None
    ranks: tuple[int, ...]


def find_strays(names: Sequence[str], sums: Sequence[Sequence[int]]) -> list[Strays]:
    """The tensors whose sums are not equal, in order; `sums` has a list for each rank, with a number for each name."""
    found: list[Strays] = []
    ranks = range(len(sums))
    for index, name in enumerate(names):
        column = [of_rank[index] for of_rank in sums]
        value, count = Counter(column).most_common(1)[0]
        if 2 * count <= len(column):
            found.append(Strays(name, None, tuple(ranks)))
        elif count < len(column):
            found.append(Strays(name, column.index(value), tuple(rank for rank in ranks if column[rank] != value)))
    return found


def describe(strays: Strays, tensor: Tensor, world: World) -> str:
    """Who differs, and in what. Collective."""
    who = _who(strays, world)
    if strays.root is None:
        return f"ranks {who} hold different values, and none of them a majority, first in {strays.name}"
    theirs = flat(tensor).clone()
    broadcast_tensor(theirs, world, strays.root)
    own = _compare(flat(tensor).cpu(), theirs.cpu()) if world.rank in strays.ranks else ""
    first = world.comm.allgather(own)[strays.ranks[0]]
    verb = "ranks {} hold" if len(strays.ranks) > 1 else "rank {} holds"
    return f"{verb.format(who)} other values than most ranks, first in {strays.name}: {first}"


def describe_past(strays: Strays, world: World) -> str:
    """Who differed, where that can be looked at no more. Collective."""
    who = _who(strays, world)
    if strays.root is None:
        return f"ranks {who} held different values, and none of them a majority, in {strays.name}"
    return f"{'ranks' if len(strays.ranks) > 1 else 'rank'} {who} held other values than most ranks, in {strays.name}"


def heal(strays: Strays, tensor: Tensor, world: World) -> None:
    """Gives strays what the majority holds, bit for bit. Collective."""
    assert strays.root is not None
    broadcast_tensor(tensor, world, strays.root)


def _who(strays: Strays, world: World) -> str:
    hosts = world.comm.allgather(world.host)
    return some_of([f"{rank} ({hosts[rank]})" for rank in strays.ranks])


def some_of(words: Sequence[str]) -> str:
    """The first ones, and how many more there are."""
    more = f" and {len(words) - MOST_NAMED} more" if len(words) > MOST_NAMED else ""
    return ", ".join(words[:MOST_NAMED]) + more


def _compare(own: Tensor, theirs: Tensor) -> str:
    """How many elements differ in their bits, and the first of them."""
    size = own.element_size()
    differs = (own.view(torch.uint8) != theirs.view(torch.uint8)).view(-1, size).any(1).numpy()
    first = int(np.flatnonzero(differs)[0])
    return (
        f"{int(differs.sum()):,} of {own.numel():,} elements, the first {own[first].item():g} instead of "
        f"{theirs[first].item():g}"
    )
