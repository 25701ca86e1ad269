"""Running statistics of batch norm, combined over ranks by sample counts; and its error for a single sample."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mpidp.errors import SHARED_MARK, DataError
from mpidp.train.sync_batch_norm import SyncBatchNorm
from mpidp.world.status import status
from mpidp.world.world import World

# All batch norms derive from it; instance norm has running statistics only when asked.
_Normalisation = nn.modules.batchnorm._NormBase
log = logging.getLogger("mpidp")


class Statistics:
    """Counts the samples that a module was trained on, on this rank, since its running statistics were combined.

    Attributes:
        num_samples: how many.

    Args:
        module: the model; its layers are looked for when they are needed.
    """

    def __init__(self, module: nn.Module):
        self._module = module
        self.num_samples = 0
        self._has_warned = False

    def count(self, is_training: bool, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Counts a call of the model; the first dimension of the first tensor is the number of samples."""
        if is_training:
            tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim())
            self.num_samples += next((len(tensor) for tensor in tensors), 1)

    def combine(self, world: World) -> None:
        """Sets the statistics to those of the samples of all ranks. Collective."""
        combine_statistics(self._module, world, self.num_samples)
        self.num_samples = 0

    def warn_if_apart(self, what: str, world: World) -> None:
        """Warns once, on rank 0, that `what` has statistics of one rank's samples only. Not collective."""
        if self._has_warned or not self.num_samples or world.size == 1 or not _layers(self._module):
            return
        self._has_warned = True
        if world.rank == 0:
            log.warning(
                "%s: running statistics of batch norm are those of this rank's samples; "
                "call model.combine_statistics() on all ranks before",
                what,
            )


def combine_statistics(module: nn.Module, world: World, num_samples: int) -> None:
    """Sets running statistics to those of the samples of all ranks. Collective.

    Training leaves each rank with running means and variances of its own samples. The combined mean is the mean of
    means weighted by samples; the combined variance adds the variance of the means to the mean of the variances.

    Args:
        module: the model; without batch norm, or with SyncBatchNorm only, nothing happens or is communicated.
        world: the ranks.
        num_samples: samples this rank has trained on since the last call.
    """
    layers = _layers(module)
    if not layers or world.size == 1:
        return
    means, variances = (
        _concatenate([m.running_mean for m in layers]),
        _concatenate([m.running_var for m in layers]),
    )
    sums = torch.cat([means, variances + means.square(), torch.ones(1, dtype=torch.float64)])
    # A rank without samples may hold NaN, which times 0 is NaN.
    sums = sums * num_samples if num_samples else torch.zeros_like(sums)
    total, first, second = _sum_over_ranks(sums, world, means.numel())
    if total == 0:
        return
    mean = first / total
    _scatter(mean, [m.running_mean for m in layers])
    _scatter(second / total - mean.square(), [m.running_var for m in layers])


def _layers(module: nn.Module) -> list[_Normalisation]:
    layers = [m for m in module.modules() if isinstance(m, _Normalisation) and m.running_mean is not None]
    return [m for m in layers if not isinstance(m, SyncBatchNorm)]  # those have the statistics of all ranks


def _concatenate(tensors: list[Tensor | None]) -> Tensor:
    return torch.cat([tensor.detach().double().cpu().flatten() for tensor in tensors if tensor is not None])


def _sum_over_ranks(sums: Tensor, world: World, numel: int) -> tuple[float, Tensor, Tensor]:
    total = torch.tensor(world.sum(sums.tolist()), dtype=torch.float64)
    return float(total[-1]), total[:numel], total[numel : 2 * numel]


def _scatter(flat: Tensor, targets: list[Tensor | None]) -> None:
    start = 0
    for target in targets:
        if target is not None:
            target.copy_(flat[start : start + target.numel()].view(target.shape))
            start += target.numel()


_TORCHS_WORDS = "Expected more than 1 value per channel when training"


def explain_batch_norm(error: Exception, module: nn.Module, world: World) -> DataError | None:
    """What to raise, from `error`, where a batch norm layer was given one value a channel in training. Not collective.

    Args:
        error: what the module's forward raised.
        module: the model.
        world: the ranks.

    Returns:
        None for any other error, and for that of `SyncBatchNorm`, which all ranks raise together.
    """
    if not isinstance(error, ValueError) or _TORCHS_WORDS not in str(error) or getattr(error, SHARED_MARK, False):
        return None
    if not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules()):
        return None  # group norm has the same message for too few channels
    return DataError(
        f"batch norm takes mean and variance over the samples of a rank, and rank {world.rank} of {world.size} "
        f"({world.host}) has 1 sample to train on in step {status.step + 1:,}: the remainder of an epoch, or a "
        f"micro-batch. Leave out an incomplete last step (drop_last=True, data.drop_last), choose a global_batch that "
        f"leaves every rank two samples in its last step, too, or take them over all ranks "
        f"(mpidp.SyncBatchNorm.convert, train.sync_batch_norm)."
    )
