"""Exponential moving averages of a model's weights."""

from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mpidp.train.batch_norm import SyncBatchNorm


class Ema:
    """A second copy of a model, whose parameters are averages over the steps. Not collective.

    All ranks have the same parameters, so each computes the same averages; nothing is reduced. Buffers, such as running
    statistics of batch norm, are those of the model.

    Args:
        module: the model, not wrapped; the averages begin with its parameters after the first step.
        decay: share of the average that a step keeps, from 0 to 1.
    """

    def __init__(self, module: nn.Module, decay: float):
        self._module = module
        self._average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(decay)).eval()  # type: ignore[no-untyped-call]
        SyncBatchNorm.revert(self._average)

    def update(self) -> None:
        """Takes in the parameters after a step."""
        self._average.update_parameters(self._module)

    def model(self) -> nn.Module:
        """The copy with the averages and the model's present buffers, for evaluation."""
        with torch.no_grad():
            for own, present in zip(self._average.module.buffers(), self._module.buffers(), strict=True):
                own.copy_(present)
        averaged: nn.Module = self._average.module
        return averaged

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and buffers by the model's names, and the number of steps."""
        return {"model": self.model().state_dict(), "steps": int(self._average.n_averaged)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what `state_dict` returned."""
        self._average.module.load_state_dict(state["model"])
        self._average.n_averaged.fill_(state["steps"])
