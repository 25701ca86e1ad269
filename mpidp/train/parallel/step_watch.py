"""Steps of any optimizer in, a word before and after each out, to wrappers that are held weakly.

Torch calls such hooks for all optimizers of the process. GradScaler has no hook, and decides by each rank's own
gradients whether to step: it is made to have them reduced first.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mpidp.world.world import World

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class StepListener(Protocol):
    """Who wants to know."""

    def on_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        """An optimizer, anybody's, is about to step; returns its arguments, if changed."""

    def on_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """It has stepped."""

    def prepare_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """Its gradients are about to be unscaled and looked at for infinities."""


_listeners: list[weakref.ref[StepListener]] = []  # in the order in which they were made, the same on all ranks


def watch_steps(listener: StepListener) -> None:
    """Calls a listener before and after each step of any optimizer, as long as somebody holds it."""
    _install()
    _listeners.append(weakref.ref(listener, _listeners.remove))


def unwatch_steps(listener: StepListener) -> None:
    """Ends it."""
    _listeners[:] = [each for each in _listeners if each() is not listener]


def _living() -> list[StepListener]:
    return [listener for each in list(_listeners) if (listener := each()) is not None]


def _before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    changed: Arguments | None = None
    for listener in _living():
        changed = listener.on_step(optimizer, args, kwargs) or changed
    return changed


def _after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for listener in _living():
        listener.on_stepped(optimizer)


def mean_loss(world: World, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """The arguments of an optimizer's step, with the mean over ranks of what the closure returns; None without one.

    An optimizer that decides by the loss, as LBFGS does in its line search, then decides the same on all ranks. Each
    call of the closure is collective.
    """
    # Torch gives the hook the optimizer itself first.
    optimizer, *rest = args
    closure: Callable[[], Any] | None = rest[0] if rest else kwargs.get("closure")
    if closure is None:
        return None

    @functools.wraps(closure)
    def of_all_ranks() -> Any:
        loss = closure()
        if loss is None:
            return None
        value = loss.detach() if isinstance(loss, torch.Tensor) else loss
        values: list[float] = world.comm.allgather(float(value))
        mean = sum(values) / len(values)  # the same bits on all ranks
        return torch.full_like(value, mean) if isinstance(value, torch.Tensor) else mean

    if rest:
        return (optimizer, of_all_ranks, *rest[1:]), kwargs
    return args, {**kwargs, "closure": of_all_ranks}


@functools.cache
def _install() -> None:
    """Puts the hooks in place, once, and changes torch's GradScaler; docs/decisions/0017 says why."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)
    plain = GradScaler._unscale_grads_  # all ways of unscaling and looking for infinities come here

    @functools.wraps(plain)
    def unscale(self: GradScaler, optimizer: torch.optim.Optimizer, *args: Any) -> Any:
        for listener in _living():
            listener.prepare_gradients(optimizer)
        return plain(self, optimizer, *args)

    GradScaler._unscale_grads_ = unscale  # type: ignore[method-assign,assignment]
