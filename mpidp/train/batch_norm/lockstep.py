"""A model in, its calls in step on all ranks out, where it has SyncBatchNorm layers: these wait for each other.

Without such layers, or in evaluation, or on one rank, nothing is done and nothing communicated.
"""

import torch
from torch import nn

from mpidp.train.batch_norm.group import FAILED, FORWARD, REDUCTION, SyncGroup
from mpidp.train.batch_norm.sync import sync_layers


class Lockstep:
    """Has the ranks meet before each forward pass and each reduction of gradients.

    Args:
        module: the model; its layers are looked for once.
    """

    def __init__(self, module: nn.Module):
        self._layers = sync_layers(module)
        self._is_in_pass = False  # between a forward pass and the end of its backward

    def before_forward(self) -> None:
        """Collective.

        Raises:
            Exception: on all ranks, what another rank failed by.
            MismatchError: on all ranks, another rank does not run the model now.
        """
        if (group := self._group()) is not None:
            group.meet(FORWARD)
            self._is_in_pass = torch.is_grad_enabled()

    def before_reduction(self) -> None:
        """Collective.

        Raises:
            MismatchError: on all ranks, another rank runs the model once more.
        """
        if (group := self._group()) is not None:
            group.meet(REDUCTION)

    def fail(self, error: Exception) -> None:
        """This rank cannot run the model now. Collective, and raises on all ranks; without layers it does nothing.

        Once this rank is inside a pass, the others may be in any layer: then the error is raised here alone.
        """
        if (group := self._group()) is None:
            return
        if self._is_in_pass:
            raise error
        group.meet(FAILED, error)

    def after_backward(self) -> None:
        """A backward pass is over, or has failed. Not collective."""
        self._is_in_pass = False

    def rebuild(self) -> None:
        """Goes on after ranks were lost. Collective."""
        self._is_in_pass = False
        for group in dict.fromkeys(layer.group for layer in self._layers if layer.group is not None):
            group.rebuild()

    def _group(self) -> SyncGroup | None:
        """Whom layers will communicate with in the next forward pass; None if they will not."""
        groups = (layer.group for layer in self._layers if layer.training)
        return next((group for group in groups if group is not None and group.size > 1), None)
