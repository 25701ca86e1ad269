"""Activations of one rank in, the same normalised over the samples of all ranks out; also for uneven and no samples."""

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812  # the name every PyTorch program gives it

from mpidp.errors import MpidpError
from mpidp.train.moments import Moments, moments_of, reduced_dimensions, widened
from mpidp.train.signature import check_same
from mpidp.train.sync_group import SyncGroup
from mpidp.world.abort import SHARED_MARK
from mpidp.world.world import World

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
    taken in float32. Second derivatives are not there.
    """

    group: SyncGroup | None = None
    number = 0
    former: type[_BatchNorm] = nn.SyncBatchNorm  # takes the same inputs, and is plain without torch.distributed

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
        with world.together("converting batch norm"):
            layers = _find(module)
        check_same(world, [f"layer {name}: {layer}" for name, layer in layers.items()], "the batch norm layers")
        group = SyncGroup(world, list(layers)) if layers else None
        for number, layer in enumerate(layers.values()):
            former = layer.former if isinstance(layer, SyncBatchNorm) else type(layer)
            # Whoever holds the layer, twice in one model or in a list, then holds the new one.
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
            ValueError: on all ranks, all ranks together have one value a channel.
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
            error = ValueError("Expected more than 1 value per channel when training, got 1 on all ranks together")
            setattr(error, SHARED_MARK, True)
            raise error
        self._update_statistics(moments)
        dtype = widened(input[:0]).dtype
        mean, variance = moments.mean, moments.deviations / max(1, moments.count)
        mean, variance = torch.stack([mean, variance]).to(input.device, dtype)
        output: Tensor = _Normalise.apply(input, self.weight, self.bias, mean, variance, moments.count, self)  # type: ignore[no-untyped-call]
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


class _Normalise(torch.autograd.Function):
    """Normalises by given statistics, which are a function of the inputs of all ranks: backward adds their part."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: int,
        layer: SyncBatchNorm,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, weight, mean, variance)
        ctx.count, ctx.layer = count, layer
        # torch's kernels want 16-bit inputs with parameters and statistics of one dtype, and statistics are float32.
        if input.dtype != mean.dtype and weight is not None and bias is not None:
            weight, bias = widened(weight), widened(bias)
        return F.batch_norm(input, mean, variance, weight, bias, False, 0.0, layer.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradient of the sum over ranks of what each rank calls backward on.

        DataParallel divides that sum by the number of ranks. The statistics depend on every input, so an input's
        gradient has means over the outputs of all ranks in it. Weight and bias get the part of this rank's outputs;
        DataParallel adds the others'. No gradient (None) is that of a rank whose loss is a mean over nothing: it
        adds nothing, but its samples, if it has any, moved the others' outputs.
        """
        input, weight, mean, variance = ctx.saved_tensors  # on every rank: recomputed here under checkpointing
        shape = [1, -1] + [1] * (input.dim() - 2)
        inverse = (variance + ctx.layer.eps).rsqrt()
        normal = (widened(input) - mean.view(shape)).mul_(inverse.view(shape))
        sums = mean.new_zeros(2, len(mean))
        if gradient is not None:
            gradient = widened(gradient)
            dimensions = reduced_dimensions(input)
            sums = torch.stack([gradient.sum(dimensions), (gradient * normal).sum(dimensions)])
        of_input = None
        if ctx.needs_input_grad[0]:
            means = ctx.layer.group.sum(sums.double().cpu().flatten(), ctx.layer.number, backward=True).view(2, -1)
            means = (means / max(1, ctx.count)).to(sums)
            if gradient is not None or len(input):
                scale = inverse if weight is None else inverse * widened(weight)
                normal.mul_(-means[1].view(shape)).sub_(means[0].view(shape))
                if gradient is not None:
                    normal.add_(gradient)
                of_input = normal.mul_(scale.view(shape)).to(input.dtype)
        of_bias, of_weight = (None, None) if gradient is None or weight is None else sums.to(weight.dtype)
        return of_input, of_weight, of_bias, None, None, None, None


def sync_layers(module: nn.Module) -> list[SyncBatchNorm]:
    """The synchronised layers of a module, each once."""
    return [layer for layer in module.modules() if isinstance(layer, SyncBatchNorm)]


def sync_groups(layers: Iterable[SyncBatchNorm]) -> list[SyncGroup]:
    """The groups that layers communicate in, each once."""
    return list(dict.fromkeys(layer.group for layer in layers if layer.group is not None))


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
