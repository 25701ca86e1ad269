"""The class `Batch`: the samples of one step on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpidp.errors import DataError
from mpidp.hdf5.order.keyed import IntArray
from mpidp.world.status import NO_BATCH, status
from mpidp.world.world import accumulate_only, check_count, check_loss, weighed

if TYPE_CHECKING:
    from mpidp.world.world import World


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
