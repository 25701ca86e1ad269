"""Enters: a seed, an epoch, row numbers. Leaves: random numbers that belong to the samples.

What a sample draws depends on seed, epoch and its row number, and on how much was drawn for it before: not on
its place in the batch nor on the number of ranks. Each sample has a SplitMix64 stream of its own (Steele, Lea
and Flood, "Fast splittable pseudorandom number generators", 2014). For augmentation; it keeps no secrets.
"""

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mpidp.hdf5.order.bijection import mix
from mpidp.hdf5.order.keyed import SAMPLE_NOISE, IntArray, WordArray, words

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
