"""Activations of one rank in, the same normalised over the samples of all ranks out; also for uneven and no samples."""

from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from mpidp.errors import DataError, MpidpError
from mpidp.train.batch_norm.group import SyncGroup
from mpidp.train.batch_norm.moments import Moments, moments_of, widened
from mpidp.train.batch_norm.normalise import Normalise
from mpidp.train.signature import check_same
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
            DataError: on all ranks, all ranks together have one value a channel.
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
