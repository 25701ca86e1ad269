"""Enters: how many bytes this rank wants to hold. Leaves: an error on every rank where a node has less."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from mpidp.errors import DataError
from mpidp.world.memory import available_memory

if TYPE_CHECKING:
    from mpidp.world.world import World

# Model, optimizer, batches and libraries need some too.
LARGEST_SHARE = 0.9


def check_room(world: World | None, mode: str, num_bytes: int) -> None:
    """Raise `DataError` on every rank if some node cannot hold what its ranks want. Collective.

    Args:
        world: the ranks; None is this process alone.
        mode: the loader's, for the message: "node" or "store".
        num_bytes: what this rank wants; ranks of a node may want different amounts.
    """
    if world is None:
        _check(mode, num_bytes, 1)
        return
    needed = world.sum_on_node(num_bytes)
    with world.together("making room for the data"):
        _check(mode, needed, world.num_nodes)


def _check(mode: str, needed: int, num_nodes: int) -> None:
    left = available_memory()
    usable = None if left is None else int(LARGEST_SHARE * left)
    if left is not None and usable is not None and needed > usable:
        raise DataError(
            f'mode="{mode}" holds the decoded data in memory: {needed:,} bytes on {socket.gethostname()}, where memory '
            f"has {left:,} bytes left, of which the data may take {usable:,}. {_advice(mode, num_nodes)}"
        )


def _advice(mode: str, num_nodes: int) -> str:
    if mode == "node" and num_nodes > 1:
        return 'Take mode="store", which spreads the data over the nodes, or mode="stream"; or ask for more memory'
    return 'Take mode="stream"; or ask for more memory (sbatch --mem=0), or for more nodes with mode="store"'
