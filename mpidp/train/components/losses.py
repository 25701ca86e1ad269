"""A loss's name in, a function (output, target) -> mean loss out; and how many answers were right."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own habit)
from torch import Tensor

from mpidp.config import LossSection
from mpidp.train.components.lookup import find

Loss = Callable[[Tensor, Tensor], Tensor]

BUILT_IN = {
    "cross_entropy": "mpidp.train.components.losses:cross_entropy",
    "mse_loss": "torch.nn.functional:mse_loss",
    "l1_loss": "torch.nn.functional:l1_loss",
    "smooth_l1_loss": "torch.nn.functional:smooth_l1_loss",
    "huber_loss": "torch.nn.functional:huber_loss",
    "nll_loss": "torch.nn.functional:nll_loss",
    "binary_cross_entropy_with_logits": "torch.nn.functional:binary_cross_entropy_with_logits",
}


def build_loss(section: LossSection) -> Loss:
    """The loss of the run file; it returns the mean over the samples it is given."""
    return partial(find("loss.name", section.name, BUILT_IN), **section.arguments)


def cross_entropy(output: Tensor, target: Tensor, **arguments: float) -> Tensor:
    """Cross entropy of class scores (N, C), or of a sequence of them (N, T, C) against (N, T)."""
    if _classes_last(output, target):
        output, target = output.flatten(0, -2), target.flatten()
    return F.cross_entropy(output, target.long(), **arguments)  # type: ignore[arg-type]


def count_right(output: Tensor, target: Tensor) -> Tensor | None:
    """Right answers per sample, summed: how many class scores have their largest at the target. None for no classes.

    For sequences it is the mean over the sequence, summed over samples.
    """
    if target.is_floating_point() or not _classes_last(output, target):
        return None
    right = (output.argmax(-1) == target).double()
    return right.flatten(1).mean(1).sum() if right.dim() > 1 else right.sum()


def _classes_last(output: Tensor, target: Tensor) -> bool:
    return isinstance(output, torch.Tensor) and output.dim() == target.dim() + 1 and output.shape[:-1] == target.shape
