"""Sums over ranks for the layers of `SyncBatchNorm`, with an error instead of a deadlock.

The layers of all ranks wait for each other in forward and in backward, so a rank that runs other layers than the others
would block them. Therefore every message says which layer sends it, and before each forward pass and each reduction of
gradients the wrapper compares what the ranks are about to do.

A mean of squares less the square of the mean loses all digits where the mean is large. So each rank takes deviations
from its own mean, and moves them to the common one: T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating formulae and a
pairwise algorithm for computing sample variances", COMPSTAT 1982, here for all parts at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpidp.errors import SHARED_MARK, MismatchError
from mpidp.printable import listed
from mpidp.world.collectives import share_error
from mpidp.world.mpi import MPI, reduced
from mpidp.world.status import status
from mpidp.world.world import World

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Moments:
    """Count, mean and squared deviations of the values of each channel.

    Attributes:
        count: values a channel; 0 where there is no sample.
        mean: of each channel, shape (channels), float64, in host memory; 0 where there is no value.
        deviations: sum of squared differences from that mean, likewise.
    """

    count: int
    mean: Tensor
    deviations: Tensor

    def sums(self) -> Tensor:
        """Count and sums of values, shape (1 + channels); their sum over parts is that of all values."""
        return torch.cat([torch.tensor([self.count], dtype=torch.float64), self.count * self.mean])

    def deviations_from(self, mean: Tensor) -> Tensor:
        """Squared differences from the mean of all; their sum over parts is that of all values."""
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


FORWARD, REDUCTION, FAILED = 1, 2, 4


class SyncGroup:
    """The ranks that the synchronised layers of a model compute with. Construction is collective.

    It has a communicator of its own: gradients may be reduced by a helper thread while backward is inside a layer. On
    a GPU backward runs in autograd's thread while the training thread waits; `mpidp.init` has checked that MPI allows
    it. The communicator is never freed, as copies of the model may use it as well.

    Args:
        world: the ranks.
        names: of the layers, for messages; a layer is known by its place here.
    """

    def __init__(self, world: World, names: Sequence[str]):
        self._world = world
        self._names = tuple(names)
        self._comm = world.comm.Dup() if world.size > 1 else None

    @property
    def size(self) -> int:
        """Number of ranks; with 1 there is nothing to communicate."""
        return self._world.size

    def __deepcopy__(self, memo: object) -> "SyncGroup":
        return self  # a copy of the model communicates with the same ranks

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()  # other processes know nothing of these ranks

    def combine(self, own: Moments, layer: int) -> Moments:
        """The moments of the values of all ranks, the same bits on all. Collective."""
        count, mean = mean_of_sums(self.sum(own.sums(), layer))
        return Moments(count, mean, self.sum(own.deviations_from(mean), layer))

    def sum(self, numbers: Tensor, layer: int, backward: bool = False) -> Tensor:
        """The sums over ranks of float64 numbers in host memory. Collective, in one order of layers.

        They are few, so copying them to the host costs little compared with the wait for the slowest rank, and every
        MPI library can sum them there.

        Raises:
            MismatchError: on all ranks, when some sum for another layer.
        """
        assert self._comm is not None
        tag = 2 * layer + backward
        message = torch.cat([numbers, torch.tensor([tag, tag * tag], dtype=torch.float64)])
        self._comm.Allreduce(MPI.IN_PLACE, message.numpy(), op=MPI.SUM)
        # Mean and mean square of the tags are equal to this rank's on all ranks only if all tags are the same.
        if message[-2:].tolist() != [self.size * tag, self.size * tag * tag]:
            self._raise_for_all(
                f"{'backward' if backward else 'forward'} of batch norm layer {self._names[layer]}",
                "With SyncBatchNorm all ranks must run the same layers in the same order.",
            )
        return message[:-2]

    def check_next(self, what: int, error: Exception | None = None) -> None:
        """Returns when all ranks are about to do the same, FORWARD or REDUCTION. Collective.

        Args:
            what: FORWARD, REDUCTION, or FAILED if this rank can do neither.
            error: the reason for FAILED.

        Raises:
            Exception: on all ranks, the error of the lowest rank that has one.
            MismatchError: on all ranks, when some run the model once more and others do not.
        """
        assert self._comm is not None
        found = reduced(self._comm, what, MPI.BOR)
        if found & FAILED:
            world = self._world
            note = f"on rank {world.rank} of {world.size} ({world.host}), after step {status.step:,}"
            share_error(self._comm, error, note)
        if found != what:
            self._raise_for_all(
                "a forward pass" if what == FORWARD else "the reduction of gradients",
                "With SyncBatchNorm every rank must run the model equally often in a step; "
                "Batch.micro_batches may give one rank more slices than another.",
            )

    def _raise_for_all(self, mine: str, advice: str) -> None:
        """Raises an error that says at which call each rank is. Collective, where all ranks know that they differ."""
        assert self._comm is not None
        everyones: list[str] = self._comm.allgather(mine)
        ranks = {what: [rank for rank, one in enumerate(everyones) if one == what] for what in dict.fromkeys(everyones)}
        told = "; ".join(f"{_ranks(numbers)} came to {what}" for what, numbers in ranks.items())
        error = MismatchError(f"after step {status.step:,} the ranks are not at the same call: {told}. {advice}")
        setattr(error, SHARED_MARK, True)
        raise error


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {listed(numbers)}"


class Lockstep:
    """The comparison of all ranks' next call before each forward pass and each reduction of gradients.

    Args:
        layers: of class `SyncBatchNorm`, of the model.
    """

    def __init__(self, layers: Sequence[Any]):
        self._layers = layers
        self._is_in_pass = False  # between a forward pass and the end of its backward

    def before_forward(self) -> None:
        """Collective.

        Raises:
            Exception: on all ranks, what another rank failed by.
            MismatchError: on all ranks, another rank does not run the model now.
        """
        if (group := self._group()) is not None:
            group.check_next(FORWARD)
            self._is_in_pass = torch.is_grad_enabled()

    def before_reduction(self) -> None:
        """Collective.

        Raises:
            MismatchError: on all ranks, another rank runs the model once more.
        """
        if (group := self._group()) is not None:
            group.check_next(REDUCTION)

    def fail(self, error: Exception) -> None:
        """This rank cannot run the model now. Collective, and raises on all ranks; without layers it does nothing.

        Once this rank is inside a pass, the others may be in any layer: then the error is raised here alone.
        """
        if (group := self._group()) is None:
            return
        if self._is_in_pass:
            raise error
        group.check_next(FAILED, error)

    def after_backward(self) -> None:
        """A backward pass is over, or has failed. Not collective."""
        self._is_in_pass = False

    def _group(self) -> SyncGroup | None:
        """Whom layers will communicate with in the next forward pass; None if they will not."""
        groups = (layer.group for layer in self._layers if layer.training)
        return next((group for group in groups if group is not None and group.size > 1), None)
