"""What a checkpoint keeps of an optimizer, sharded or not, and back, over any number of ranks."""

from collections.abc import Sequence
from typing import Any

import torch

from mpidp.train.sharded.layout import Run, by_parameter, overlap, shards
from mpidp.train.sharded.optimizer import ShardedOptimizer
from mpidp.train.sharded.state import RANKS, SHAPES, ReadRank, SavedPart, like, plain_state, to_parts


def shared_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What rank 0 saves for all: the whole, or, of a sharded one, all but its state."""
    if not isinstance(optimizer, ShardedOptimizer):
        return optimizer.state_dict()
    return {
        "param_groups": optimizer.groups_state_dict(),
        SHAPES: _shapes(optimizer),
        RANKS: optimizer.world.size,
    }


def own_state(optimizer: torch.optim.Optimizer) -> list[SavedPart]:
    """What each rank saves for itself."""
    if not isinstance(optimizer, ShardedOptimizer):
        return []
    return [(run.parameter, run.start, run.stop, state) for run, state in optimizer.own_parts()]


def restore(optimizer: torch.optim.Optimizer, saved: dict[str, Any], read: ReadRank) -> None:
    """Takes the state of a checkpoint. Not collective; to do on every rank.

    Args:
        optimizer: sharded or not.
        saved: what `shared_state` returned, sharded or not.
        read: gives what `own_state` returned on a rank; asked for those ranks only of which something is needed.
    """
    if RANKS not in saved:
        optimizer.load_state_dict(saved)
    elif not isinstance(optimizer, ShardedOptimizer) or saved[SHAPES] != _shapes(optimizer):
        optimizer.load_state_dict(plain_state(saved, read))
    else:
        optimizer.load_groups_state_dict(saved["param_groups"])
        of_ranks = shards([parameter.numel() for parameter in like(saved)], saved[RANKS])
        wanted = by_parameter(optimizer.runs, lambda run: run)
        needed = [rank for rank, runs in enumerate(of_ranks) if _meet(runs, wanted)]
        optimizer.load_parts(part for rank in needed for part in to_parts(read(rank)))


def kind(optimizer: torch.optim.Optimizer) -> str:
    """Name of the class whose state is kept; of a sharded one, of the one inside."""
    return type(optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer).__qualname__


def _shapes(optimizer: ShardedOptimizer) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(tuple(p.shape), p.stride()) for group in optimizer.param_groups for p in group["params"]]


def _meet(runs: Sequence[Run], wanted: dict[int, list[Run]]) -> bool:
    return any(overlap(run, other) for run in runs for other in wanted.get(run.parameter, ()))
