"""Losses by the names that run files give them, and what they accept."""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own habit)
from torch import Tensor

from mpidp.errors import DataError

Loss = Callable[[Tensor, Tensor], Tensor]

LOSSES = {
    "cross_entropy": "mpidp.train.losses:cross_entropy",
    "mse_loss": "torch.nn.functional:mse_loss",
    "l1_loss": "torch.nn.functional:l1_loss",
    "smooth_l1_loss": "torch.nn.functional:smooth_l1_loss",
    "huber_loss": "torch.nn.functional:huber_loss",
    "nll_loss": "torch.nn.functional:nll_loss",
    "binary_cross_entropy_with_logits": "torch.nn.functional:binary_cross_entropy_with_logits",
}


# The losses of torch that compare output and target element by element, and broadcast different shapes.
ELEMENTWISE = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy_with_logits,
    F.binary_cross_entropy,
    F.poisson_nll_loss,
    F.soft_margin_loss,
    F.kl_div,
)


def cross_entropy(output: Tensor, target: Tensor, **arguments: float) -> Tensor:
    """Cross entropy of class scores.

    Args:
        output: scores (N, C), of a sequence (N, T, C), or, as torch has it, (N, C, ...).
        target: the classes, integers of any dtype: (N,), (N, T) or (N, ...); or floating-point probabilities (N, C).
        arguments: torch's own.

    Raises:
        DataError: a target of another dtype or shape, which says what to write in a run file.
    """
    if target.is_floating_point():
        _check_probabilities(output, target)
        return F.cross_entropy(output, target, **arguments)  # type: ignore[arg-type]
    if _classes_last(output, target):
        output, target = output.flatten(0, -2), target.flatten()
    elif isinstance(output, Tensor) and output.dim() == target.dim() > 1:
        raise DataError(_too_many_dimensions(output, target))
    return F.cross_entropy(output, target.long(), **arguments)  # type: ignore[arg-type]


def _check_probabilities(output: Tensor, target: Tensor) -> None:
    """Raises DataError for floating-point targets, unless they are probabilities of shape (N, C)."""
    if not isinstance(output, Tensor) or (target.dim() == 2 and output.shape == target.shape):
        return
    text = (
        f"cross_entropy takes classes as integers, or floating-point probabilities of the shape of the output (N, C), "
        f"not floating-point targets {tuple(target.shape)} for an output {tuple(output.shape)}"
    )
    if output.shape == target.shape and target.dim() > 2:
        raise DataError(f'{text}. loss.name = "torch.nn.functional:cross_entropy" takes them as (N, C, ...).')
    raise DataError(
        f'{text}. For classes stored as floating-point numbers write [data.field.NAME] decode = "numpy:int64", which '
        f'cuts off fractions; for numbers to be predicted loss.name = "mse_loss".'
    )


def _too_many_dimensions(output: Tensor, target: Tensor) -> str:
    text = (
        f"cross_entropy takes one integer for each class to be found, and targets {tuple(target.shape)} have as many "
        f"dimensions as the output {tuple(output.shape)}"
    )
    if target.shape == output.shape:
        return f'{text}. For one-hot or other probabilities write [data.field.NAME] dtype = "float32".'
    if target.dim() == 2 and target.shape[1] == 1:
        return f'{text}. To make them ({len(target)},) write [data.field.NAME] decode = "numpy:ravel".'
    return f"{text}. Change the shape in data.transform."


def elementwise(loss: Callable[..., Tensor], output: Tensor, target: Tensor, **arguments: float) -> Tensor:
    """A loss of torch, without its broadcasting: (N,) against (N, 1) would compare every sample with every other."""
    if isinstance(output, Tensor) and output.shape != target.shape:
        raise DataError(
            f"{loss.__name__} takes an output and a target of the same shape, not {tuple(output.shape)} and "
            f"{tuple(target.shape)}. {_same_shape_advice(output, target)}"
        )
    if isinstance(output, Tensor) and not (target.is_floating_point() or target.is_complex()):
        target = target.to(output.dtype)
    return loss(output, target, **arguments)


def _same_shape_advice(output: Tensor, target: Tensor) -> str:
    if target.dim() == 2 and output.shape == target.shape[:1]:
        return f'To make the target ({len(target)},) write [data.field.NAME] decode = "numpy:ravel".'
    if target.dim() == 1 and output.shape == (len(target), 1):
        return "To make the target (N, 1) let a data.transform of yours return its unsqueeze(1)."
    return "Change the model, or the shape in data.transform."


def count_right(output: Tensor, target: Tensor) -> Tensor | None:
    """Right answers per sample, summed: how many class scores have their largest at the target. None for no classes.

    For sequences it is the mean over the sequence, summed over samples. Class probabilities as targets have none.
    """
    if target.is_floating_point() or not _classes_last(output, target):
        return None
    right = (output.argmax(-1) == target).double()
    return right.flatten(1).mean(1).sum() if right.dim() > 1 else right.sum()


def _classes_last(output: Tensor, target: Tensor) -> bool:
    return isinstance(output, torch.Tensor) and output.dim() == target.dim() + 1 and output.shape[:-1] == target.shape
