"""Enters: the user's functions for samples and batches. Leaves: batches that have gone through them, checked."""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from mpidp.errors import DataError
from mpidp.hdf5.batches.sample_random import SampleRandom

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
    """Return what `transform`, which takes `random` unless it is None, makes of a batch of `size` samples.

    Raises `DataError` if it has not as many.
    """
    made: Tensors = transform(tensors) if random is None else transform(tensors, random)  # type: ignore[call-arg]
    for name, tensor in made.items():
        if tensor.dim() == 0 or len(tensor) != size:
            raise DataError(
                f'transform returned "{name}" of shape {tuple(tensor.shape)} for a batch of {size} samples; '
                "its first axis must still count them"
            )
    return made
