"""Values of one rank in; their count, means and squared deviations out, in a form whose sums over ranks are right.

A mean of squares less the square of the mean loses all digits where the mean is large. So each rank takes deviations
from its own mean, and moves them to the common one: T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating formulae and a
pairwise algorithm for computing sample variances", COMPSTAT 1982, here for all parts at once.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Moments:
    """What is known of the values of each channel.

    Attributes:
        count: values a channel; 0 where there is no sample.
        mean: of each channel, shape (channels), float64, in host memory; 0 where there is no value.
        deviations: sum of squared differences from that mean, likewise.
    """

    count: int
    mean: Tensor
    deviations: Tensor

    def sums(self) -> Tensor:
        """Count and sums of values, shape (1 + channels); summed over parts, the count and sums of all."""
        return torch.cat([torch.tensor([self.count], dtype=torch.float64), self.count * self.mean])

    def deviations_from(self, mean: Tensor) -> Tensor:
        """Squared differences from the mean of all; summed over parts, the `deviations` of all."""
        return self.deviations + self.count * (self.mean - mean).square()


def moments_of(values: Tensor) -> Moments:
    """The moments of a batch of shape (samples, channels, ...), any floating dtype, on any device."""
    count, channels = math.prod([len(values), *values.shape[2:]]), values.shape[1]
    if not count:
        return Moments(0, *torch.zeros(2, channels, dtype=torch.float64))
    variance, mean = torch.var_mean(widened(values.detach()), reduced_dimensions(values), correction=0)
    variance, mean = torch.stack([variance, mean]).double().cpu()  # one copy from the device
    return Moments(count, mean, count * variance)


def mean_of_sums(sums: Tensor) -> tuple[int, Tensor]:
    """Count and mean from the sum over parts of what `Moments.sums` gives; means are 0 where there is no value."""
    count = round(float(sums[0]))
    return count, sums[1:] / max(1, count)


def reduced_dimensions(values: Tensor) -> list[int]:
    """All dimensions but that of the channels."""
    return [0, *range(2, values.dim())]


def widened(tensor: Tensor) -> Tensor:
    """16-bit numbers as 32-bit ones, in which torch computes with them, too."""
    return tensor.float() if tensor.dtype in HALF else tensor
