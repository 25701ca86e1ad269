"""Enters: a mode, the rows that are used. Leaves: the source that serves them in that mode."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, get_args

from mpidp.errors import DataError
from mpidp.hdf5.batches.budget import Resources
from mpidp.hdf5.batches.ring import BatchRing
from mpidp.hdf5.batches.source import FileSource, MemorySource, Mode, Stretch
from mpidp.hdf5.order.order import Order
from mpidp.hdf5.order.steps import Share
from mpidp.hdf5.rows.pieces import PieceReader, Selection

if TYPE_CHECKING:
    from mpidp.hdf5.staging.staging import Staging
    from mpidp.world.world import World


class Source(Protocol):
    """Where rows come from; batches lie in the memory of `ring`."""

    ring: BatchRing

    @property
    def line(self) -> str:
        """What it does, in one line."""

    def steps(self, order: Order, share: Share, use: Resources) -> Stretch:
        """Return the steps of `share`, without end. What was returned before must have been closed."""

    def renew(self, ring: BatchRing) -> None:
        """Go on with other shares and memory for batches: ranks have died. Not collective."""

    def close(self) -> None:
        """Give back memory and files. Collective where memory is shared."""


class StagedSource(FileSource):
    """Rows read from copies of the files on this node."""

    def __init__(self, staging: Staging, selection: Selection, ring: BatchRing, depth: int) -> None:
        staged = replace(selection, dataset=selection.dataset.moved(staging.paths))
        super().__init__(staged, ring, depth, staging.line)
        self._staging = staging

    def close(self) -> None:
        """Say that this process needs the copies no more."""
        self._staging.close()


def check_mode(mode: Mode) -> None:
    """Raise `DataError` unless there is such a mode."""
    if mode not in get_args(Mode):
        raise DataError(f'mode is {mode!r}; give "stream", "node", "store" or "stage"')


def open_source(
    mode: Mode,
    selection: Selection,
    world: World | None,
    ring: BatchRing,
    depth: int,
    threads: int,
    stage_folder: str | Path | None,
) -> Source:
    """Return the source for a mode. Collective; in modes other than "stream" it reads or copies all data."""
    if mode == "stream":
        return FileSource(selection, ring, depth, "read from the files as they are needed")
    # Importing these starts MPI, which planning a run on a login node must not.
    if mode == "stage":
        from mpidp.hdf5.staging.staging import Staging

        return StagedSource(Staging(selection.dataset.paths, world, stage_folder), selection, ring, depth)
    from mpidp.hdf5.memory.contents import Contents
    from mpidp.hdf5.memory.node_memory import NodeMemory
    from mpidp.hdf5.memory.spread_memory import SpreadMemory

    contents = Contents.of(selection)
    with closing(PieceReader(selection)) as reader:
        if mode == "node":
            return MemorySource(NodeMemory(contents, reader.read, world, threads), selection, ring, depth)
        return MemorySource(SpreadMemory(contents, reader.read, world, threads), selection, ring, 0)
