"""Comparison of settings and files between ranks, before a loader is made."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from mpidp.errors import MismatchError
from mpidp.hdf5.dataset import DataSet
from mpidp.hdf5.field import FieldSpec
from mpidp.hdf5.files.describe import Paths, check_present, decoders, describe

if TYPE_CHECKING:
    from mpidp.world.world import World


def describe_on_all_ranks(world: World, paths: Paths, specs: tuple[FieldSpec, ...], allow_holes: bool) -> DataSet:
    """Return the data set as rank 0 finds it, checked to be there on every node. Collective."""
    # The user's functions are each rank's own: they stay where they are.
    dataset = world.call_on_root(lambda: replace(describe(paths, specs, allow_holes), decoders={}))
    dataset = replace(dataset, decoders=decoders(specs))
    with world.raise_on_all_ranks("finding the data"):
        if world.local_rank == 0:
            check_present(dataset)
    return dataset


def check_agreed(
    world: World, settings: tuple[object, ...], made: str, names: str, paths: tuple[str, ...] = ()
) -> None:
    """Raise `MismatchError` on every rank unless all were given the same settings. Collective.

    A file may have another path on each rank, by a link or from a folder of its own.
    """
    roots, roots_paths = world.broadcast((settings, paths))
    with world.raise_on_all_ranks(f"comparing the settings of {made}"):
        if settings != roots or not _are_same_files(paths, roots_paths):
            own, others = (*paths, *settings), (*roots_paths, *roots)
            raise MismatchError(
                f"rank {world.rank} made {made} with {own}, rank 0 with {others}: {names}; give the same on every rank"
            )


def _are_same_files(here: tuple[str, ...], at_root: tuple[str, ...]) -> bool:
    try:
        pairs = zip(here, at_root, strict=True)
        return all(one == other or os.path.samefile(one, other) for one, other in pairs)
    except (OSError, ValueError):  # a file is not there; another number of files
        return False
