"""Steps of any optimizer in, a word before and after each out, to a listener that is held weakly."""

import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class StepListener(Protocol):
    """Who wants to know."""

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer, anybody's, is about to step."""

    def on_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """It has stepped."""


class StepWatch:
    """Torch keeps such hooks for ever, and they must not keep the listener, which holds a model."""

    def __init__(self, listener: StepListener):
        self._listener = weakref.ref(listener)
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def remove(self) -> None:
        """Ends it."""
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        listener = self._listener()
        if listener is not None:
            listener.on_step(optimizer)

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        listener = self._listener()
        if listener is not None:
            listener.on_stepped(optimizer)
