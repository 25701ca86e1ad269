"""Hooks before and after optimizer steps, and the check that the stepped gradients are reduced.

An optimizer may step gradients that are in their buckets and were reduced after they were accumulated. Torch calls such
hooks for all optimizers of the process. GradScaler has no hook, and decides by each rank's own gradients whether to
step: it is patched to have them reduced first.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from mpidp.errors import MpidpError
from mpidp.printable import listed
from mpidp.reduce.buckets import Buckets
from mpidp.world.world import World

if TYPE_CHECKING:
    from mpidp.train.gradient_sync import GradientSync

WRAP_ANEW = (
    "Change the model first (new layers, adapters, parametrizations, load_state_dict(assign=True)), then wrap it and "
    "make the optimizer; of a wrapped one: model = mpidp.DataParallel(model.unwrap(), world)."
)


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    """All parameters that it holds."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


class StepCheck:
    """Checks the gradients of a wrapped module before an optimizer steps. Not collective; reduces nothing.

    A gradient is identified by its memory: the same tensor object may refer to other memory (`p.grad.data = ...`), and
    another object to the bucket. Changes in between are found by the buckets' version counters, which torch
    increases at each change in place.

    Args:
        module: the wrapped module.
        buckets: of the parameters that it trains.
    """

    def __init__(self, module: nn.Module, buckets: Buckets):
        self._module = module
        self._buckets = buckets
        self._index = {id(parameter): index for index, parameter in enumerate(buckets.parameters)}
        self._foreign = WeakIdKeyDictionary()  # parameters of optimizers that are not of the module
        self._has_reduced = False
        self._stepped = weakref.WeakSet[torch.optim.Optimizer]()  # since the last reduction
        self._versions: list[int] = []  # of the buckets after the last pass or step

    def held(self, optimizer: torch.optim.Optimizer) -> list[int]:
        """Which of the module's parameters the optimizer holds, by their numbers in the buckets.

        Raises:
            MpidpError: it holds one of the module, with a gradient, that the wrapper does not know.
        """
        numbers, unknown = [], []
        for parameter in parameters_of(optimizer):
            index = self._index.get(id(parameter))
            if index is not None:
                numbers.append(index)
            elif parameter.grad is not None and parameter not in self._foreign:
                unknown.append(parameter)
        if unknown:
            self._check_foreign(unknown)
        return numbers

    def holds_any(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer holds some parameter of the module."""
        return any(id(parameter) in self._index for parameter in parameters_of(optimizer))

    def elsewhere(self, numbers: Sequence[int]) -> list[int]:
        """The parameters among these whose gradients are not in their buckets."""
        return [index for index in numbers if not self._buckets.is_in_bucket(index)]

    def was_set_by_hand(self, optimizer: torch.optim.Optimizer, elsewhere: Sequence[int]) -> bool:
        """Whether there are gradients that no backward pass has written since this optimizer last stepped."""
        if self._has_reduced and optimizer not in self._stepped:
            return False
        return bool(elsewhere) or (bool(self._versions) and self._versions != self._present())

    def check_untouched(self) -> None:
        """Raises MpidpError if accumulated gradients were changed before they were reduced, as by clipping."""
        if self._versions != self._present():
            raise MpidpError(
                "gradients were changed after backward() under no_sync() and before they were reduced (clipping, "
                "scaling, noise): each rank has changed its own part of the sum. Call model.synchronize() on all ranks "
                "first."
            )

    def accumulated(self) -> None:
        """Records the end of a backward pass that was not reduced."""
        self._versions = self._present()

    def reduced(self) -> None:
        """Records that all gradients are the mean over ranks."""
        self._has_reduced = True
        self._stepped.clear()
        self._versions = self._present()

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Records that an optimizer that holds some parameter of the module has stepped."""
        self._stepped.add(optimizer)
        self._versions = self._present()

    def _present(self) -> list[int]:
        return [bucket.flat._version for bucket in self._buckets.buckets]

    def _check_foreign(self, parameters: Sequence[nn.Parameter]) -> None:
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        own = [names[id(parameter)] for parameter in parameters if id(parameter) in names]
        if own:
            raise MpidpError(
                f"an optimizer is about to step {listed(own, most=3)}, whose gradients are not reduced: "
                f"such parameters came into the model, or took the place of others, after it was wrapped, or were "
                f"unfrozen and used without calling the wrapper. {WRAP_ANEW}"
            )
        for parameter in parameters:
            self._foreign[parameter] = None


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


_syncs: list[weakref.ref["GradientSync"]] = []  # in the order in which they were made, the same on all ranks


def watch_steps(sync: "GradientSync") -> None:
    """Has it called before and after each step of any optimizer, as long as it is referenced."""
    _install()
    _syncs.append(weakref.ref(sync, _syncs.remove))


def unwatch_steps(sync: "GradientSync") -> None:
    """Ends the calls."""
    _syncs[:] = [each for each in _syncs if each() is not sync]


def _living() -> list["GradientSync"]:
    return [sync for each in list(_syncs) if (sync := each()) is not None]


def _before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    changed: Arguments | None = None
    for sync in _living():
        changed = sync.before_step(optimizer, args, kwargs) or changed
    return changed


def _after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for sync in _living():
        sync.after_step(optimizer)


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
    """Installs the hooks, once, and patches torch's GradScaler; docs/decisions/0017 says why."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)
    plain = GradScaler._unscale_grads_  # all ways of unscaling and looking for infinities come here

    @functools.wraps(plain)
    def unscale(self: GradScaler, optimizer: torch.optim.Optimizer, *args: Any) -> Any:
        for sync in _living():
            sync.prepare_gradients(optimizer)
        return plain(self, optimizer, *args)

    GradScaler._unscale_grads_ = unscale  # type: ignore[method-assign,assignment]
