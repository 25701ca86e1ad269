"""A batch and the statistics of all ranks' batches in; the normalised batch, and in backward its gradients, out."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812  # the name every PyTorch program gives it

from mpidp.train.batch_norm.moments import reduced_dimensions, widened


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
    """One number a channel, in a shape that meets the batch's."""
    return channels.view(1, -1, *[1] * (batch.dim() - 2))
