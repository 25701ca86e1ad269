"""Enters: HDF5 files, field names, a global batch size. Leaves: this rank's `Batch` of every step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpidp.errors import DataError, MismatchError
from mpidp.hdf5.assemble import Assembled, assemble
from mpidp.hdf5.batch import Batch
from mpidp.hdf5.dataset import DataSet
from mpidp.hdf5.describe import Paths, absolute_paths, check_present, describe
from mpidp.hdf5.gather import MOST_DECODED_BYTES
from mpidp.hdf5.lanes import automatic_lanes
from mpidp.hdf5.order import Order, Shuffle
from mpidp.hdf5.pieces import Selection
from mpidp.hdf5.prefetch import Prefetcher
from mpidp.hdf5.split import Part, Split

if TYPE_CHECKING:
    from mpidp.world.world import World

Transform = Callable[[dict[str, Tensor]], dict[str, Tensor]]


class HDF5Loader:
    """Iterates over the steps of an epoch; constructing it is collective.

    One `for` loop is the rest of the current epoch; at its end the next epoch, with another order, is
    current. A batch counts as consumed when it is handed out, so `state_dict()` inside the loop body includes
    it, and what was only read ahead is never included. After a `break` the next loop goes on behind the last
    batch handed out. Every rank takes the same number of steps; no iteration is collective.

    paths: one HDF5 file or several, laid end to end. fields: names of datasets whose first axis counts
    samples. global_batch: samples of a step over all ranks. seed: of order and split. world: the ranks that
    share the samples; None is this process alone, on the CPU. shuffle: "lanes", "full" or "none" (see
    `Order`). lanes, mixing_chunks: see `Order`; lanes are chosen from the file when None. split: ("train", f)
    or ("validation", f) takes that part of the rows, f being the fraction for validation. transform: is given
    the fields of a batch, a dict of tensors (samples, ...) on the device, and returns such a dict with as
    many samples; batches may have none. prefetch_batches: how many batches are read ahead.

    Raises `DataError` on every rank for files or values that cannot be used, and `MismatchError` when ranks
    were given different ones.
    """

    def __init__(
        self,
        paths: Paths,
        fields: Sequence[str],
        global_batch: int,
        seed: int = 0,
        world: World | None = None,
        shuffle: Shuffle = "lanes",
        lanes: int | None = None,
        mixing_chunks: int = 4,
        split: tuple[Part, float] | None = None,
        transform: Transform | None = None,
        prefetch_batches: int = 2,
    ) -> None:
        self.world = world
        order = (global_batch, seed, shuffle, lanes, mixing_chunks, split)
        _check_agreed(world, (absolute_paths(paths), tuple(fields), order))
        self.dataset = _describe(world, paths, fields)
        with nullcontext() if world is None else world.together("choosing the order of the samples"):
            self._selection = _select(self.dataset, split, seed)
            if lanes is None:
                lanes = automatic_lanes(self.dataset.num_rows, self.dataset.mean_chunk_bytes, mixing_chunks)
            self.order = Order(self._selection.chunk_rows, seed, lanes, mixing_chunks, global_batch, shuffle)
            _check_batches(global_batch, prefetch_batches, self.order.num_samples, self.dataset)
        self._transform = transform
        self._prefetch_batches = prefetch_batches
        self._epoch = 0
        self._position = 0
        self._active: Prefetcher[Assembled] | None = None
        _warn_if_slow(self.order, self.dataset, world)

    @property
    def num_samples(self) -> int:
        """Samples of an epoch, over all ranks."""
        return self.order.num_samples

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0."""
        return self._epoch

    @property
    def position(self) -> int:
        """Global samples of the current epoch that were handed out."""
        return self._position

    @property
    def remaining_steps(self) -> int:
        """Steps from the position to the end of the current epoch."""
        return self.order.steps(self._position)

    def __len__(self) -> int:
        """Return the number of steps of a whole epoch."""
        return self.order.steps()

    def __iter__(self) -> Iterator[Batch]:
        self.close()
        if self._position == self.num_samples:
            self._finish_epoch()
        rank, size = (0, 1) if self.world is None else (self.world.rank, self.world.size)
        plan = self.order.plan(self._epoch)
        make = partial(assemble, self._selection, plan, self._position, size, rank, self._device)
        active = self._active = Prefetcher(make, self._prefetch_batches)
        try:
            for assembled in active:
                batch = self._batch(assembled)
                self._position = assembled.stop
                yield batch
            self._finish_epoch()
        finally:
            active.close()

    def close(self) -> None:
        """End the pass in progress, if any, and its thread. The position stays."""
        if self._active is not None:
            self._active.close()
            self._active = None

    def state_dict(self) -> dict[str, Any]:
        """Return what the order depends on, and how many global samples of which epoch were handed out."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "num_samples": self.num_samples,
            "seed": self.order.seed,
            "lanes": self.order.lanes,
            "mixing_chunks": self.order.mixing_chunks,
            "shuffle": self.order.shuffle,
            "global_batch": self.order.global_batch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken: exactly its unseen samples follow.

        Seed, lanes and mixing_chunks of `state` are adopted. Another global batch and another number of ranks
        are fine. Raises `DataError` for another number of samples or shuffle, and, if the rows are split by
        the seed, for another seed.
        """
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise DataError(f"the state lacks {', '.join(sorted(missing))}; it is not one of a loader")
        fixed = {"num_samples": self.num_samples, "shuffle": self.order.shuffle}
        if self._selection.split is not None:
            fixed["seed"] = self.order.seed  # or rows held out for validation would now be trained on
        for name, here in fixed.items():
            if state[name] != here:
                raise DataError(
                    f"the checkpoint was written with {name} = {state[name]!r}, this loader has {here!r}; "
                    "resume with the same data and settings"
                )
        if not 0 <= state["position"] <= self.num_samples or state["epoch"] < 0:
            place = f"epoch {state['epoch']}, position {state['position']}"
            raise DataError(f"the checkpoint is at {place}, outside {self.num_samples} samples; it is damaged")
        self.close()
        adopted = {name: state[name] for name in ("seed", "lanes", "mixing_chunks")}
        self.order = replace(self.order, **adopted)
        self._epoch, self._position = state["epoch"], state["position"]

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu") if self.world is None else self.world.device

    def _finish_epoch(self) -> None:
        self._epoch, self._position = self._epoch + 1, 0

    def _batch(self, assembled: Assembled) -> Batch:
        tensors = {name: t.to(self._device, non_blocking=True) for name, t in assembled.tensors.items()}
        if self._transform is not None:
            tensors = self._transform(tensors)
            _check_transformed(tensors, len(assembled.indices))
        return Batch(tensors, assembled.indices, assembled.stop - assembled.start, self.world)


def _describe(world: World | None, paths: Paths, fields: Sequence[str]) -> DataSet:
    """Return the data set as rank 0 finds it, checked to be there on every node. Collective."""
    if world is None:
        return describe(paths, fields)
    dataset = world.from_root(lambda: describe(paths, fields))
    with world.together("finding the data"):
        if world.local_rank == 0:
            check_present(dataset)
    return dataset


def _check_agreed(world: World | None, settings: tuple[object, ...]) -> None:
    """Raise `MismatchError` on every rank unless all were given the same settings. Collective."""
    if world is None:
        return
    roots = world.broadcast(settings)
    with world.together("comparing the settings of HDF5Loader"):
        if settings != roots:
            raise MismatchError(
                f"rank {world.rank} made an HDF5Loader with {settings}, rank 0 with {roots}: paths, fields, "
                "(global_batch, seed, shuffle, lanes, mixing_chunks, split); give the same on every rank"
            )


def _check_batches(global_batch: int, prefetch_batches: int, num_samples: int, dataset: DataSet) -> None:
    if global_batch > num_samples:
        raise DataError(
            f"global_batch is {global_batch}, but there are only {num_samples} samples in "
            f"{dataset.files[0].path}; give at most that many"
        )
    if prefetch_batches < 1:
        raise DataError(f"prefetch_batches is {prefetch_batches}; give at least 1")


def _select(dataset: DataSet, split: tuple[Part, float] | None, seed: int) -> Selection:
    if split is None:
        return Selection(dataset)
    part, fraction = split
    if part not in ("train", "validation"):
        raise DataError(f'split asks for part {part!r}; give "train" or "validation"')
    return Selection(dataset, Split(dataset.chunk_rows, fraction, seed), part)


def _check_transformed(tensors: dict[str, Tensor], size: int) -> None:
    for name, tensor in tensors.items():
        if tensor.dim() == 0 or len(tensor) != size:
            raise DataError(
                f'transform returned "{name}" of shape {tuple(tensor.shape)} for a batch of {size} samples; '
                "its first axis must still count them"
            )


def _warn_if_slow(order: Order, dataset: DataSet, world: World | None) -> None:
    """Say once on rank 0 when whole chunks will be decoded for single rows."""
    too_large = dataset.num_rows * dataset.row_bytes > MOST_DECODED_BYTES
    rows = dataset.num_rows // len(dataset.chunk_rows)
    if order.shuffle == "full" and too_large and rows > 1 and any(file.chunked for file in dataset.files):
        if world is not None and world.rank != 0:
            return
        warnings.warn(
            f'shuffle="full" on {dataset.files[0].path} decodes a chunk of about {rows} rows for each row; '
            'shuffle="lanes" decodes each chunk once, or write the file with smaller chunks',
            stacklevel=3,
        )
