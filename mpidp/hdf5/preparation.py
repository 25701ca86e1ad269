"""What a loader does before its first pass: ranks agree on settings and files, and the rows are chosen."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from mpidp.errors import DataError, MismatchError
from mpidp.hdf5.dataset import DataSet
from mpidp.hdf5.field import FieldSpec
from mpidp.hdf5.files.describe import Paths, check_present, decoders, describe
from mpidp.hdf5.order.split import Part, Split
from mpidp.hdf5.read import Selection

if TYPE_CHECKING:
    from mpidp.world.world import World

T = TypeVar("T")


def call_on_root(world: World | None, function: Callable[[], T]) -> T:
    """Return what `function` gives on rank 0. Collective."""
    return function() if world is None else world.call_on_root(function)


def choose_threads(threads: int | None, world: World | None) -> int:
    """Return how many threads decode: those asked for, or this rank's cores; raises `DataError` for fewer than 1."""
    if threads is not None and threads < 1:
        raise DataError(f"threads is {threads}; give at least 1")
    return threads or (len(os.sched_getaffinity(0)) if world is None else world.cores)


def describe_together(world: World | None, paths: Paths, specs: tuple[FieldSpec, ...], allow_holes: bool) -> DataSet:
    """Return the data set as rank 0 finds it, checked to be there on every node. Collective."""
    if world is None:
        return describe(paths, specs, allow_holes)
    # The user's functions are each rank's own: they stay where they are.
    dataset = world.call_on_root(lambda: replace(describe(paths, specs, allow_holes), decoders={}))
    dataset = replace(dataset, decoders=decoders(specs))
    with world.raise_on_all_ranks("finding the data"):
        if world.local_rank == 0:
            check_present(dataset)
    return dataset


def check_agreed(
    world: World | None, settings: tuple[object, ...], made: str, names: str, paths: tuple[str, ...] = ()
) -> None:
    """Raise `MismatchError` on every rank unless all were given the same settings. Collective.

    A file may have another path on each rank, by a link or from a folder of its own.
    """
    if world is None:
        return
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


def check_batches(global_batch: int, prefetch_batches: int, num_samples: int, dataset: DataSet) -> None:
    """Raise `DataError` for a batch larger than the data, and where nothing would be read ahead."""
    if global_batch > num_samples:
        raise DataError(
            f"global_batch is {global_batch}, but there are only {num_samples} samples in "
            f"{dataset.files[0].path}; give at most that many"
        )
    if prefetch_batches < 1:
        raise DataError(f"prefetch_batches is {prefetch_batches}; give at least 1")


def select(dataset: DataSet, split: tuple[Part, float] | None, seed: int) -> Selection:
    """Return the rows that are used: all, or a part of a split. Raises `DataError` for a part that there is not."""
    if split is None:
        return Selection(dataset)
    part, fraction = split
    if part not in ("train", "validation"):
        raise DataError(f'split asks for part {part!r}; give "train" or "validation"')
    return Selection(dataset, Split(dataset.chunk_rows, fraction, seed), part)
