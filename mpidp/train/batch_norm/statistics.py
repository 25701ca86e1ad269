"""Running statistics of batch norm on each rank in, their combination by sample counts on every rank out."""

import torch
from torch import Tensor, nn

from mpidp.train.batch_norm.sync import SyncBatchNorm
from mpidp.world.world import World

# All batch norms derive from it; instance norm has running statistics only when asked.
_Normalisation = nn.modules.batchnorm._NormBase


def combine_statistics(module: nn.Module, world: World, num_samples: int) -> None:
    """Gives every rank the statistics of the samples of all ranks. Collective.

    Training leaves each rank with running means and variances of its own samples. The combined mean is the mean of
    means weighted by samples; the combined variance adds the variance of the means to the mean of the variances.

    Args:
        module: the model; without batch norm, or with SyncBatchNorm only, nothing happens or is communicated.
        world: the ranks.
        num_samples: samples this rank has trained on since the last call.
    """
    layers = [m for m in module.modules() if isinstance(m, _Normalisation) and m.running_mean is not None]
    layers = [m for m in layers if not isinstance(m, SyncBatchNorm)]  # those have the statistics of all ranks
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
