"""Scaling of losses over unequal parts, so that their plain mean over ranks is the mean over all parts.

Apart from the collective helpers, since a loader of one process alone must not import MPI.
"""

from typing import Any

import torch
from torch import Tensor

from mpidp.errors import DataError
from mpidp.world.status import status


def weighed(loss: Tensor, here: int, everywhere: int, size: int) -> Tensor:
    """Return `loss` (scalar) scaled by its share; without anything here, a zero that gives no gradient.

    Args:
        loss: the mean over `here` things.
        here: how many things this rank has.
        everywhere: how many all ranks have.
        size: number of ranks.
    """
    if here == 0:
        return _no_gradient(loss)
    # Bit for bit the user's own loss where there is nothing to scale.
    return loss if here * size == everywhere else loss * (here * size / everywhere)


def accumulate_only(loss: Tensor) -> Tensor:
    """Return `loss`, whose backward pass `DataParallel` then does not reduce: more is to come of the same sum."""
    marked = _Accumulate.apply(loss)  # type: ignore[no-untyped-call]
    assert isinstance(marked, Tensor)
    return marked


def check_loss(loss: Tensor) -> None:
    """Raise `DataError` for a loss that is no scalar."""
    if loss.dim() != 0:
        raise DataError(
            f"weigh was given a loss of shape {tuple(loss.shape)}; give the mean over the local samples, a scalar"
        )


def check_count(count: int) -> None:
    """Raise `DataError` for a negative count."""
    if count < 0:
        raise DataError(f"weigh was given a count of {count}; give the number of things the loss is a mean of")


class _NoGradient(torch.autograd.Function):
    """Zero, with a backward pass through the graph that leaves every gradient undefined.

    Multiplying by 0 instead would turn the NaN of a mean over nothing into NaN gradients.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> None:
        return None


def _no_gradient(loss: Tensor) -> Tensor:
    zero = _NoGradient.apply(loss)  # type: ignore[no-untyped-call]
    assert isinstance(zero, Tensor)
    return zero


class _Accumulate(torch.autograd.Function):
    """The identity, whose backward pass says that it belongs to a sum which is not complete."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        status.accumulating_pass = torch._C._current_graph_task_id()
        return gradients
