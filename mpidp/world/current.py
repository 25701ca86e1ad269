"""The current `World` of this process. Imports neither MPI nor torch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mpidp.errors import LaunchError
from mpidp.world.launch import launch_facts

if TYPE_CHECKING:
    from mpidp.world.world import World

_world: World | None = None


def current_world() -> World | None:
    """Return the World that `mpidp.init` made in this process, or None. Starts nothing."""
    return _world


def set_current_world(world: World) -> None:
    """Make `world` the one of this process; `mpidp.init` does."""
    global _world
    _world = world


def resolve_world(world: World | None, what: str) -> World:
    """Return the world that `what` was given, else the one that `mpidp.init` made, else that of this process alone.

    Args:
        world: the caller's argument.
        what: what needs a world, for the message.

    Raises:
        LaunchError: none was given, the launcher started several processes, and `mpidp.init` was not called.
    """
    if world is not None:
        return world
    if _world is not None:
        return _world
    facts = launch_facts(os.environ)
    if (facts.size or 1) > 1:
        raise LaunchError(
            f"{what} was made before mpidp.init() in a job of {facts.size} processes ({facts.launcher}): each would "
            f"take all samples. Call world = mpidp.init() first, or give world=mpidp.World.alone() if each is to work "
            f"alone."
        )
    from mpidp.world.world import World

    return World.alone()
