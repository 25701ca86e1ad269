"""Enters: a rank's samples of a step, in host memory. Leaves: its `Batch`: transformed, on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mpidp.hdf5.batches.assemble import Assembled
from mpidp.hdf5.batches.batch import Batch
from mpidp.hdf5.batches.device_copy import DeviceCopier
from mpidp.hdf5.batches.sample_random import SampleRandom
from mpidp.hdf5.batches.transform import (
    BatchTransform,
    SampleTransform,
    transform_batch,
    transform_samples,
    wants_random,
)

if TYPE_CHECKING:
    from mpidp.world.world import World

_HOST = torch.device("cpu")


class BatchMaker:
    """Makes the batches of a loader: transforms samples, copies them to the device, transforms the batch."""

    def __init__(
        self, world: World | None, transform: BatchTransform | None, sample_transform: SampleTransform | None
    ) -> None:
        self._world = world
        self._device = _HOST if world is None else world.device
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
