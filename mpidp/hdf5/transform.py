"""Users' transforms: from a rank's samples in host memory to its batch on the device.

What a sample draws depends on seed, epoch and its row number, and on how much was drawn for it before: not on
its place in the batch nor on the number of ranks. Each sample has a SplitMix64 stream of its own (Steele, Lea
and Flood, "Fast splittable pseudorandom number generators", 2014). For augmentation; it keeps no secrets.
"""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mpidp.errors import DataError
from mpidp.hdf5.batch import Batch
from mpidp.hdf5.modes.stream import Assembled
from mpidp.hdf5.plan import SAMPLE_NOISE, IntArray, WordArray, mix, words

if TYPE_CHECKING:
    from mpidp.world.world import World


_GOLDEN = 0x9E3779B97F4A7C15
_WORD = 2**64


class SampleRandom:
    """Draws random numbers for the samples of one batch, on its device."""

    def __init__(self, seed: int, epoch: int, indices: IntArray, device: torch.device) -> None:
        key = words(1, seed, SAMPLE_NOISE, epoch)
        self._streams = mix(mix(np.asarray(indices).astype(np.uint64) + np.uint64(1)) ^ key)
        self._device = device
        self._drawn = 0

    def uniform(self, *shape: int) -> Tensor:
        """Return numbers in [0, 1): float32 (samples, *shape)."""
        return self._tensor(self._uniform(math.prod(shape)), shape)

    def normal(self, *shape: int) -> Tensor:
        """Return normally distributed numbers, mean 0 and variance 1: float32 (samples, *shape)."""
        count = math.prod(shape)
        pairs = self._uniform(2 * count)
        # Box and Muller, 1958; 1 - u is never 0, whose logarithm would be infinite.
        radius = np.sqrt(-2.0 * np.log(1.0 - pairs[:, :count]))
        return self._tensor(radius * np.cos(2.0 * np.pi * pairs[:, count:]), shape)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Return integers in [0, high), high at most 2^32: int64 (samples, *shape)."""
        assert 1 <= high <= 2**32, high
        numbers = (self._uniform(math.prod(shape)) * high).astype(np.int64)
        return torch.from_numpy(numbers.reshape(len(numbers), *shape)).to(self._device)

    def generators(self) -> Iterator[torch.Generator]:
        """Yield a generator on the CPU for each sample, seeded by what the sample draws next."""
        for (seed,) in (self._words(1) >> np.uint64(1)).tolist():
            generator = torch.Generator()
            generator.manual_seed(seed)
            yield generator

    def _uniform(self, count: int) -> npt.NDArray[np.float64]:
        return (self._words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def _words(self, count: int) -> WordArray:
        steps = np.arange(self._drawn + 1, self._drawn + count + 1).astype(np.uint64) * np.uint64(_GOLDEN)
        self._drawn += count
        return mix(self._streams[:, None] + steps)

    def _tensor(self, numbers: npt.NDArray[np.float64], shape: tuple[int, ...]) -> Tensor:
        return torch.from_numpy(numbers.astype(np.float32).reshape(len(numbers), *shape)).to(self._device)


Tensors = dict[str, Tensor]
BatchTransform = Callable[[Tensors], Tensors] | Callable[[Tensors, SampleRandom], Tensors]
SampleTransform = Callable[[Tensors, torch.Generator], Tensors]


def wants_random(transform: BatchTransform) -> bool:
    """Whether a transform of batches takes a second argument, the random numbers of the samples."""
    try:
        parameters = inspect.signature(transform).parameters.values()
    except (TypeError, ValueError):  # a function written in C tells nothing
        return False
    required = [each for each in parameters if each.default is each.empty]
    places = [each for each in required if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return len(places) >= 2


def transform_samples(transform: SampleTransform, tensors: Tensors, random: SampleRandom, size: int) -> Tensors:
    """Return what `transform` makes of each sample, stacked; as given for a batch without samples."""
    if not size:
        return tensors
    made = [
        transform({name: tensor[number] for name, tensor in tensors.items()}, generator)
        for number, generator in enumerate(random.generators())
    ]
    try:
        return {name: torch.stack([sample[name] for sample in made]) for name in made[0]}
    except (KeyError, RuntimeError, TypeError) as error:
        raise DataError(
            f"sample_transform must return the same fields, in the same shapes, for every sample ({error})"
        ) from error


def transform_batch(transform: BatchTransform, tensors: Tensors, random: SampleRandom | None, size: int) -> Tensors:
    """Return what `transform`, which takes `random` unless it is None, makes of a batch of `size` samples."""
    made: Tensors = transform(tensors) if random is None else transform(tensors, random)  # type: ignore[call-arg]
    for name, tensor in made.items():
        if tensor.dim() == 0 or len(tensor) != size:
            raise DataError(
                f'transform returned "{name}" of shape {tuple(tensor.shape)} for a batch of {size} samples; '
                "its first axis must still count them"
            )
    return made


class DeviceCopier:
    """Copies batches to a device. What a copy reads from is held until it has finished, and then given up."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in_flight: deque[tuple[torch.cuda.Event, Tensors]] = deque()

    def __call__(self, tensors: Tensors) -> Tensors:
        """Return the tensors on the device; on a GPU the copy goes on, in the current stream, after the return."""
        if self._device.type != "cuda":
            return tensors
        self._give_up_finished()
        stream = torch.cuda.current_stream(self._device)
        copies = {name: tensor.to(self._device, non_blocking=True) for name, tensor in tensors.items()}
        self._in_flight.append((stream.record_event(), tensors))
        return copies

    def _give_up_finished(self) -> None:
        # Copies of one stream finish in order, so the first that has not ends the search.
        while self._in_flight and self._in_flight[0][0].query():  # type: ignore[no-untyped-call]
            self._in_flight.popleft()


_HOST = torch.device("cpu")


class BatchMaker:
    """Makes the batches of a loader: transforms samples, copies them to the device, transforms the batch."""

    def __init__(
        self, world: World, transform: BatchTransform | None, sample_transform: SampleTransform | None
    ) -> None:
        self._world = world
        self._device = world.device
        self._copier = DeviceCopier(self._device)
        self._transform = transform
        self._wants_random = transform is not None and wants_random(transform)
        self._sample_transform = sample_transform

    def __call__(self, assembled: Assembled, seed: int) -> Batch:
        """Return the batch; random numbers follow from `seed`, the epoch and the samples."""
        tensors, size, step = assembled.tensors, len(assembled.indices), assembled.step
        if self._sample_transform is not None:
            random = SampleRandom(seed, step.epoch, assembled.indices, _HOST)
            tensors = transform_samples(self._sample_transform, tensors, random, size)
        tensors = self._copier(tensors)
        if self._transform is not None:
            on_device = None
            if self._wants_random:
                on_device = SampleRandom(seed, step.epoch, assembled.indices, self._device)
            tensors = transform_batch(self._transform, tensors, on_device, size)
        return Batch(tensors, assembled.indices, step.stop - step.start, self._world, (step.epoch, step.stop))
