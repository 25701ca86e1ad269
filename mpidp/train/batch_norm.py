"""Batch norm: the layer `SyncBatchNorm`, over the samples of all ranks; running statistics of the other layers.

Ranks may have uneven numbers of samples, or none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812  # the name every PyTorch program gives it
from torch.utils._pytree import tree_leaves

from mpidp.errors import SHARED_MARK, DataError, MpidpError
from mpidp.train.agreement import check_same
from mpidp.train.sync_group import (
    Moments,
    SyncGroup,
    moments_of,
    reduced_dimensions,
    widened,
)
from mpidp.world.status import status
from mpidp.world.world import World


class Normalise(torch.autograd.Function):
    """Normalises by given statistics, which are a function of the inputs of all ranks: backward adds their part.

    Arguments of `apply`, besides torch's of batch norm:

        count: values a channel of all ranks.
        sum_over_ranks: takes float64 numbers in host memory; called in backward, where the input has a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        eps: float,
        count: int,
        sum_over_ranks: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Output of the input's shape, dtype and strides. Not collective."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, weight, mean, variance)
        ctx.eps, ctx.count, ctx.sum_over_ranks = eps, count, sum_over_ranks
        # With 16-bit inputs torch's kernels want parameters and statistics of one dtype, and statistics are float32.
        if input.dtype != mean.dtype and weight is not None and bias is not None:
            weight, bias = widened(weight), widened(bias)
        return F.batch_norm(input, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradient of the sum over ranks of what each rank calls backward on.

        DataParallel divides that sum by the number of ranks. Weight and bias get the part of this rank's outputs;
        DataParallel adds the others'. No gradient (None) is that of a rank whose loss is a mean over nothing: it
        adds nothing, but its samples, if it has any, moved the others' outputs.
        """
        input, weight, mean, variance = ctx.saved_tensors  # by every rank: under checkpointing this runs forward
        inverse = (variance + ctx.eps).rsqrt()
        normal = (widened(input) - _spread(mean, input)).mul_(_spread(inverse, input))
        sums = mean.new_zeros(2, len(mean))
        if gradient is not None:
            gradient, dimensions = widened(gradient), reduced_dimensions(input)
            sums = torch.stack([gradient.sum(dimensions), (gradient * normal).sum(dimensions)])
        of_bias, of_weight = (None, None) if gradient is None or weight is None else sums.to(weight.dtype)
        of_input = None
        if ctx.needs_input_grad[0]:
            totals = ctx.sum_over_ranks(sums.double().cpu().flatten())  # one copy from the device and one back
            means = (totals.view(2, -1) / max(1, ctx.count)).to(sums)
            scale = inverse if weight is None else inverse * widened(weight)
            if gradient is not None or len(input):
                of_input = _gradient_of_input(normal, gradient, means, scale).to(input.dtype)
        return of_input, of_weight, of_bias, None, None, None, None, None


def _gradient_of_input(normal: Tensor, gradient: Tensor | None, means: Tensor, scale: Tensor) -> Tensor:
    """In the memory of the normalised input, which lies as the input does.

    Statistics depend on every input, so an input moves the outputs of all ranks by mean and variance as well. That
    takes the mean of the outputs' gradients away, and their mean product with the normalised input times that input.
    """
    result = normal.mul_(-_spread(means[1], normal)).sub_(_spread(means[0], normal))
    if gradient is not None:
        result.add_(gradient)
    return result.mul_(_spread(scale, normal))


def _spread(channels: Tensor, batch: Tensor) -> Tensor:
    """One number a channel, in a shape that broadcasts to the batch's."""
    return channels.view(1, -1, *[1] * (batch.dim() - 2))


M = TypeVar("M", bound=nn.Module)
_BatchNorm = nn.modules.batchnorm._BatchNorm


class SyncBatchNorm(_BatchNorm):
    """Batch norm that equals `torch.nn.BatchNorm1d`, `2d` and `3d` on the concatenated batch of all ranks.

    Output, running statistics and gradients do. In training, forward and backward are collective: all ranks run the
    same layers in the same order, ranks without samples included. In evaluation nothing is communicated, and with one
    rank the layer is torch's own, bit for bit. `state_dict()` is that of torch's layers.

    Layers are made by `convert`, of torch's layers in a model:

        model = mpidp.DataParallel(mpidp.SyncBatchNorm.convert(Net().to(world.device), world), world)

    Input: (samples, channels, ...) with 0 to 3 dimensions more; float64, float32, or 16 bits, in which statistics are
    taken in float32. Second derivatives are not supported.

    Attributes:
        group: the ranks; None for a layer that was made by hand or read from a file, until `convert` sees it.
        number: the layer's place among those of the group.
        former: the class that it had before.
    """

    group: SyncGroup | None = None
    number = 0
    former: type[_BatchNorm] = nn.SyncBatchNorm  # of one made by hand: without torch.distributed it is plain

    @staticmethod
    def convert(module: M, world: World) -> M:
        """Makes every BatchNorm1d, 2d, 3d and torch.nn.SyncBatchNorm of a module one of these, in place. Collective.

        To be called before the module is wrapped in `DataParallel`. Parameters, buffers, hooks and settings stay.

        Returns:
            `module`.

        Raises:
            MpidpError: a layer is another kind of batch norm, such as a lazy one; it is named.
            MismatchError: the ranks' modules have different layers.
        """
        with world.raise_on_all_ranks("converting batch norm"):
            layers = _find(module)
        check_same(world, [f"layer {name}: {layer}" for name, layer in layers.items()], "the batch norm layers")
        group = SyncGroup(world, list(layers)) if layers else None
        for number, layer in enumerate(layers.values()):
            former = layer.former if isinstance(layer, SyncBatchNorm) else type(layer)
            # The object stays the same, so all references to the layer, in a model or a list, see the new class.
            object.__setattr__(layer, "__class__", SyncBatchNorm)
            vars(layer).update(group=group, number=number, former=former)
        return module

    @staticmethod
    def revert(module: M) -> M:
        """Makes the layers what `convert` found, in place, so that a rank may use the module alone. Not collective."""
        for layer in sync_layers(module):
            former = layer.former
            for name in ("group", "number", "former"):
                vars(layer).pop(name, None)
            object.__setattr__(layer, "__class__", former)
        return module

    def forward(self, input: Tensor) -> Tensor:
        """Collective in training.

        Raises:
            DataError: on all ranks, there is only one value a channel on all ranks in sum.
        """
        if not self.training or (self.group is not None and self.group.size == 1):
            return super().forward(input)
        if self.group is None:
            raise MpidpError(
                "a SyncBatchNorm layer does not know the ranks: it was made by hand, or came out of a file. "
                "Call mpidp.SyncBatchNorm.convert(model, world) on all ranks."
            )
        self._check_input_dim(input)
        moments = self.group.combine(moments_of(input), self.number)
        if moments.count == 1:
            error = DataError(
                "Expected more than 1 value per channel when training, got 1 on all ranks together: the remainder of "
                "an epoch. Leave out an incomplete last step (drop_last=True, data.drop_last), or choose another "
                "global_batch."
            )
            setattr(error, SHARED_MARK, True)
            raise error
        self._update_statistics(moments)
        mean, variance = _at(input, moments)
        sum_over_ranks = partial(self.group.sum, layer=self.number, backward=True)
        arguments = (input, self.weight, self.bias, mean, variance, self.eps, moments.count, sum_over_ranks)
        output: Tensor = Normalise.apply(*arguments)  # type: ignore[no-untyped-call]
        return output

    def _check_input_dim(self, input: Tensor) -> None:
        if not 2 <= input.dim() <= 5:
            raise ValueError(f"expected 2D to 5D input (got {input.dim()}D input)")

    def _update_statistics(self, moments: Moments) -> None:
        """As torch does; where no rank has a sample there is nothing to learn from."""
        if self.running_mean is None or self.running_var is None:
            return
        factor = self.momentum
        with torch.no_grad():
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
                factor = 1 / int(self.num_batches_tracked) if factor is None else factor
            if not moments.count:
                return
            variance = moments.deviations / (moments.count - 1)
            for running, new in ((self.running_mean, moments.mean), (self.running_var, variance)):
                running.mul_(1 - (factor or 0)).add_(new.to(running), alpha=factor or 0)


def _at(input: Tensor, moments: Moments) -> Tensor:
    """Mean and biased variance, shape (2, channels), where the input is, in the dtype that it is computed with."""
    both = torch.stack([moments.mean, moments.deviations / max(1, moments.count)])
    return both.to(input.device, widened(input[:0]).dtype)


def sync_layers(module: nn.Module) -> list[SyncBatchNorm]:
    """The synchronised layers of a module, each once."""
    return [layer for layer in module.modules() if isinstance(layer, SyncBatchNorm)]


_KNOWN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, SyncBatchNorm)


def _find(module: nn.Module) -> dict[str, _BatchNorm]:
    """The batch norm layers of a module by name; raises for one that cannot be converted."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)}
    for name, layer in layers.items():
        kind = type(layer).__name__
        if isinstance(layer, nn.modules.batchnorm._LazyNormBase):
            raise MpidpError(
                f"layer {name or kind} is a {kind}, which does not know its number of channels yet: run the model "
                f"once on a small batch before SyncBatchNorm.convert, or make the layer with num_features."
            )
        if type(layer) not in _KNOWN:
            raise MpidpError(
                f"layer {name or kind} is a {kind}, a class of its own derived from batch norm: SyncBatchNorm.convert "
                f"knows torch's BatchNorm1d, 2d, 3d and SyncBatchNorm. Make it one of these."
            )
    return layers


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
    """Sets running statistics to those of the samples of all ranks, `num_samples` here since the last call. Collective.

    The combined mean is the mean of means weighted by samples; the combined variance adds the variance of the means to
    the mean of the variances. Without batch norm, or with SyncBatchNorm only, nothing is communicated.
    """
    layers = _layers(module)
    if not layers or world.size == 1:
        return
    means, variances = [layer.running_mean for layer in layers], [layer.running_var for layer in layers]
    mean = _flat(means)
    sums = torch.cat([mean, _flat(variances) + mean.square(), torch.ones(1, dtype=torch.float64)])
    # A rank without samples may hold NaN, which times 0 is NaN.
    sums = sums * num_samples if num_samples else torch.zeros_like(sums)
    *totals, total = world.sum(sums.tolist())
    if total == 0:
        return
    mean, mean_square = (torch.tensor(totals, dtype=torch.float64) / total).view(2, -1)
    _set_from(mean, means)
    _set_from(mean_square - mean.square(), variances)


def _layers(module: nn.Module) -> list[Any]:
    layers = [m for m in module.modules() if isinstance(m, _Normalisation) and m.running_mean is not None]
    return [m for m in layers if not isinstance(m, SyncBatchNorm)]  # those have the statistics of all ranks


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().double().cpu().flatten() for tensor in tensors])


def _set_from(flat: Tensor, targets: list[Tensor]) -> None:
    for target, part in zip(targets, torch.split(flat, [target.numel() for target in targets]), strict=True):
        target.copy_(part.view(target.shape))


_TORCHS_WORDS = "Expected more than 1 value per channel when training"


def explain_batch_norm(error: Exception, module: nn.Module, world: World) -> DataError | None:
    """What to raise from the error of a batch norm layer that was given one value a channel in training.

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
