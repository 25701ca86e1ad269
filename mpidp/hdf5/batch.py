"""The class `Batch`, the samples of one step on one rank, and what the classes that make batches have in common."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpidp.errors import DataError, MismatchError
from mpidp.hdf5.plan import IntArray
from mpidp.world.status import NO_BATCH, status
from mpidp.world.world import accumulate_only, check_count, check_loss, resolve_world, weighed

if TYPE_CHECKING:
    from mpidp.hdf5.order import Order
    from mpidp.world.world import World

log = logging.getLogger("mpidp")


class Batch:
    """The samples of one step that this rank holds; loaders make them.

    Each field is a tensor (size, ...) on the rank's device: `batch["x"]`, or `batch.x` where the name is not
    one of the attributes below. `x, y = batch` unpacks the tensors in the order of `fields`.

        for batch in loader:
            batch.weigh(F.cross_entropy(model(batch.x), batch.y)).backward()

    Attributes:
        fields: the names of the fields.
        size: number of samples here; 0 on a rank that has none in this step.
        global_size: number of samples of the step over all ranks.
        indices: row numbers of the samples here in the whole data set, over all files (int64 array).
        last: False on all but the last of the `micro_batches` of a step.

    Args:
        tensors: the fields by name, (n, ...) each, with n as many as `indices`.
        indices: row numbers, int64 (n,).
        global_size: samples of the step over all ranks.
        world: the ranks.
        place: epoch, and samples of it up to the end of the step.
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        indices: IntArray,
        global_size: int,
        world: World,
        place: tuple[int, int] = NO_BATCH,
    ) -> None:
        self._tensors = tensors
        self._world = world
        self._whole = True
        self._place = place  # epoch, and samples of it up to the end of this batch
        self.indices = indices
        self.global_size = global_size
        self.last = True

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields."""
        return tuple(self._tensors)

    @property
    def size(self) -> int:
        """Number of samples on this rank."""
        return len(self.indices)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise KeyError(f'no field "{name}"; this batch has {", ".join(self._tensors)}')
        return self._tensors[name]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._tensors.values())

    def __getattr__(self, name: str) -> Tensor:
        # Only for what is not found otherwise. An unpickled or copied batch may have no tensors yet.
        tensors: dict[str, Tensor] = self.__dict__.get("_tensors", {})
        if name not in tensors:
            raise AttributeError(f'no field "{name}"; this batch has {", ".join(tensors)}')
        return tensors[name]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in self._tensors.items())
        return f"Batch({shapes}; {self.size} of {self.global_size} samples)"

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Batch:
        """Return this batch with its tensors on another device.

        Args:
            device: where to copy the tensors.
            non_blocking: as in `torch.Tensor.to`.
        """
        tensors = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self._tensors.items()}
        batch = Batch(tensors, self.indices, self.global_size, self._world, self._place)
        batch.last, batch._whole = self.last, self._whole
        return batch

    def weigh(self, loss: Tensor, count: int | None = None) -> Tensor:
        """Return `loss` scaled so that its plain mean over ranks is the mean over the global batch.

        On a rank with nothing (0 samples, or count 0) the loss may be NaN; the result is then 0 and gives parameters
        no gradient at all, though `backward` still passes all of them. At world size 1 the result is `loss` itself.

        For a micro batch that is not the last, `backward()` of the result only accumulates: `DataParallel` reduces the
        sum in that of the last one.

        Args:
            loss: scalar, the mean over the samples here, or over `count` other things here.
            count: how many other things, such as tokens; then this is collective: all ranks call it, with their own
                counts.

        Raises:
            DataError: a loss that is no scalar, a negative count, and a count on a micro batch (whose share of all
                counts is not known yet: weigh sums by hand there).
        """
        check_loss(loss)
        status.batch = self._place  # `DataParallel` sees that all ranks reduce the same
        here, everywhere = (self.size, self.global_size) if count is None else self._counts(count)
        scaled = weighed(loss, here, everywhere, self._world.size)
        return scaled if self.last or self._world.size == 1 else accumulate_only(scaled)

    def micro_batches(self, max_size: int) -> list[Batch]:
        """Return this batch in slices of at most `max_size` samples, sizes within one of each other.

        The sum of their weighed losses is the weighed loss of the whole batch, so one `backward()` for each gives its
        gradients, with or without `no_sync()`. A batch without samples gives one slice without samples. Ranks may get
        different numbers of slices; `last` is True for the last. Not collective.

        Args:
            max_size: the largest number of samples in a slice, at least 1.

        Raises:
            DataError: `max_size` is less than 1.
        """
        if max_size < 1:
            raise DataError(f"micro batches of {max_size} samples; give at least 1")
        parts = max(1, -(-self.size // max_size))
        edges = [self.size * part // parts for part in range(parts + 1)]
        return [self._slice(edges[part], edges[part + 1], parts) for part in range(parts)]

    def _slice(self, start: int, stop: int, parts: int) -> Batch:
        tensors = {name: tensor[start:stop] for name, tensor in self._tensors.items()}
        batch = Batch(tensors, self.indices[start:stop], self.global_size, self._world, self._place)
        batch.last = self.last and stop == self.size
        batch._whole = parts == 1 and self._whole
        return batch

    def _counts(self, count: int) -> tuple[int, int]:
        """Return `count` and its sum over ranks. Collective."""
        if not self._whole:
            raise DataError("weigh(loss, count) was called on one of several micro batches; it needs the whole batch")
        check_count(count)
        return count, round(self._world.sum([count])[0])


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


class Passes:
    """Passes over the epochs of an order, one after the other, at one position in the current one.

    `made` and `noun` name the object in messages.
    """

    order: Order

    def __init__(self, world: World | None, made: str, noun: str) -> None:
        self.world = resolve_world(world, made)
        self._made, self._noun = made, noun
        self._pass = object()
        self._epoch = 0
        self._position = 0
        self._continues = False  # the next pass goes on from the position because someone asked for it
        self._told = False

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

    def restart(self) -> None:
        """Begin the current epoch anew, from its first step: end the pass in progress, if any. Not collective."""
        self.stop()
        self._position, self._continues = 0, False

    def stop(self) -> None:
        """End the pass in progress, if any. The position stays, and another pass may follow."""
        self._pass = object()

    def _state(self, *names: str) -> dict[str, Any]:
        """Return epoch, position, number of samples and the `names` of the order."""
        state = {"epoch": self._epoch, "position": self._position, "num_samples": self.num_samples}
        return state | {name: getattr(self.order, name) for name in names}

    def _take_position(self, state: Mapping[str, Any], fixed: Mapping[str, Any], position: int) -> None:
        """Go on at the epoch of `state` and `position`; raises `DataError` where `state` differs from `fixed`."""
        for name, here in fixed.items():
            if state[name] != here:
                raise DataError(
                    f"the state was saved with {name} = {state[name]!r}, and here it is {here!r}; resume with the same "
                    "data and settings"
                )
        if not 0 <= position <= self.num_samples or state["epoch"] < 0:
            place = f"epoch {state['epoch']}, position {position}"
            raise DataError(f"the state is at {place}, outside {self.num_samples} samples; it is damaged")
        self.stop()
        self._epoch, self._position, self._continues = state["epoch"], position, True

    def _check_pass(self, this: object) -> None:
        """Raise RuntimeError unless `this` is the pass in progress."""
        if self._pass is not this:
            raise RuntimeError(f"this pass over the {self._noun} was closed, for instance by another pass that began")

    def _begin_pass(self) -> object:
        """Return a new pass, which begins at the position in a shuffled order, or if someone asked for it."""
        this = self._pass = object()
        if not self.remaining_steps:
            self._finish_epoch()
        if self._position and not self._continues:
            if self.order.shuffle == "none":
                self._position = 0
            elif not self._told and self.world.rank == 0:
                self._told = True
                log.warning(
                    "the loop over %s goes on behind the %s of %s samples of epoch %d that the last loop was handed "
                    "before it was left; %s.restart() before a loop begins the epoch anew",
                    self._made,
                    f"{self._position:,}",
                    f"{self.num_samples:,}",
                    self._epoch,
                    self._noun,
                )
        self._continues = False
        return this

    def _finish_epoch(self) -> None:
        self._epoch, self._position = self._epoch + 1, 0
