"""Which gradients an optimizer may step: those in their buckets that were reduced since they were accumulated."""

import weakref
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from mpidp.errors import MpidpError
from mpidp.printable import listed
from mpidp.reduce.buckets import Buckets

WRAP_ANEW = (
    "Change the model first (new layers, adapters, parametrizations, load_state_dict(assign=True)), then wrap it and "
    "make the optimizer; of a wrapped one: model = mpidp.DataParallel(model.unwrap(), world)."
)


class StepCheck:
    """Looks at the gradients of a wrapped module before an optimizer steps. Not collective; tells, and reduces nothing.

    A gradient is known by its memory: the same tensor object may point to other memory (`p.grad.data = ...`), and
    another object to the bucket. What happened in between is known by the buckets' version counters, which torch
    raises at each change in place.

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
        for group in optimizer.param_groups:
            for parameter in group["params"]:
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
        return any(id(parameter) in self._index for group in optimizer.param_groups for parameter in group["params"])

    def astray(self, numbers: Sequence[int]) -> list[int]:
        """Those of these parameters whose gradients do not lie in their buckets."""
        return [index for index in numbers if not self._buckets.is_home(index)]

    def was_set_by_hand(self, optimizer: torch.optim.Optimizer, astray: Sequence[int]) -> bool:
        """Whether there are gradients that came by no backward pass since this optimizer stepped last."""
        if self._has_reduced and optimizer not in self._stepped:
            return False
        return bool(astray) or (bool(self._versions) and self._versions != self._present())

    def check_untouched(self) -> None:
        """Raises MpidpError if accumulated gradients were changed before they were reduced, as by clipping."""
        if self._versions != self._present():
            raise MpidpError(
                "gradients were changed after backward() under no_sync() and before they were reduced (clipping, "
                "scaling, noise): each rank has changed its own part of the sum. Call model.synchronize() on all ranks "
                "first."
            )

    def accumulated(self) -> None:
        """A backward pass is over that was not reduced."""
        self._versions = self._present()

    def reduced(self) -> None:
        """All gradients are the mean over ranks."""
        self._has_reduced = True
        self._stepped.clear()
        self._versions = self._present()

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer that holds some parameter of the module has stepped."""
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
