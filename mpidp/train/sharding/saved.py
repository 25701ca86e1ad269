"""What checkpoints keep of a sharded optimizer in, the plain optimizer's state out. No MPI.

What all ranks share says how parameters lie in memory; the file of each rank holds the runs of its shard.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from mpidp.train.sharding.layout import Run
from mpidp.train.sharding.state import Part, full_state_dict

# Keys that a plain optimizer's state does not have: over how many ranks it was sharded, and of each parameter shape and
# strides, as elements are cut in the order in which they lie in memory.
RANKS, SHAPES = "ranks", "shapes"

SavedPart = tuple[int, int, int, dict[str, Any]]  # parameter, start, stop, state
ReadRank = Callable[[int], list[SavedPart]]


def plain_state(saved: dict[str, Any], read: ReadRank) -> dict[str, Any]:
    """The `state_dict` that the plain optimizer would have.

    Args:
        saved: what all ranks share; returned as it is if it is of a plain optimizer.
        read: gives what a rank keeps for itself.
    """
    if RANKS not in saved:
        return saved
    parts = [part for rank in range(saved[RANKS]) for part in to_parts(read(rank))]
    return full_state_dict(saved["param_groups"], like(saved), parts)


def like(saved: dict[str, Any]) -> list[Tensor]:
    """The parameters, without memory."""
    return [torch.empty_strided(shape, strides, device="meta") for shape, strides in saved[SHAPES]]


def to_parts(saved: Iterable[SavedPart]) -> list[Part]:
    """What a rank keeps for itself, as runs with their state."""
    return [(Run(parameter, start, stop), state) for parameter, start, stop, state in saved]
