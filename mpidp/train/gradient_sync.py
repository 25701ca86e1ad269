"""The gradient synchronisation of a wrapped module, and the checks between `backward()` and the optimizer.

An optimizer may step gradients that are in their buckets and were reduced after they were accumulated. Torch calls such
hooks for all optimizers of the process. GradScaler has no hook, and decides by each rank's own gradients whether to
step: it is patched to have them reduced first.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from mpidp.errors import MpidpError
from mpidp.printable import listed
from mpidp.reduce.buckets import Buckets
from mpidp.reduce.choice import Choice
from mpidp.reduce.reduction import Reduction
from mpidp.train.agreement import Place, check_same, digest_options, learning_rates, module_signature, raise_different
from mpidp.train.batch_norm import sync_layers
from mpidp.train.replicas import ReplicaCheck, replicated
from mpidp.train.sync_group import Lockstep
from mpidp.world.status import BETWEEN, NO_BATCH, status
from mpidp.world.world import World

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
_syncs: list[weakref.ref[GradientSync]] = []  # in the order in which they were made, the same on all ranks


def _living() -> list[GradientSync]:
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


class GradientSync(Reduction):
    """Reduces the gradients of a module, and makes sure that optimizers step reduced ones. Construction is collective.

    Attributes:
        frozen: parameters that took no gradients when the buckets were made.
        lockstep: compares the ranks' calls before layers of SyncBatchNorm wait for each other.
        trouble: an error of this rank's last forward or backward pass that the program caught, for messages.
        steps_taken: by the optimizer that holds the first trainable parameter.
        replicas: compares what must be equal on all ranks, a part at each step.

    Args:
        module: the model.
        world, choice, bucket_bytes, overlap, check_finite: as of `Reduction`.
        compare_steps: number of steps in which everything that must be equal is compared once; 0 for never.
    """

    frozen: list[nn.Parameter]

    def __init__(
        self,
        module: nn.Module,
        world: World,
        choice: Choice,
        *,
        bucket_bytes: int,
        overlap: bool,
        check_finite: bool,
        compare_steps: int,
    ):
        super().__init__(world, choice, bucket_bytes, overlap, check_finite)
        self._module = module
        # One rank is plain torch: no hook, no buffer.
        self._is_plain = world.size == 1 and choice.name == "null" and not check_finite
        self.lockstep = Lockstep(sync_layers(module))
        self.trouble = ""
        self.steps_taken = 0
        self._first_step = -1  # of the job, when the model was first called
        self._steps = self._reductions = 0  # see Place
        self._optimizers = weakref.WeakSet[torch.optim.Optimizer]()  # that have stepped this model
        # With the reducer "null" every rank trains a model of its own.
        everything = partial(replicated, module, self._optimizers)
        self.replicas = ReplicaCheck(world, everything, 0 if choice.name == "null" else compare_steps)
        self._start()
        _install()
        _syncs.append(weakref.ref(self, _syncs.remove))  # called before and after each step of any optimizer

    def watch_output(self, output: Any) -> None:
        """Watches an output of the module, where backward will enter it."""
        if self._first_step < 0:
            self._first_step = status.step
        self.hooks.watch_output(output)

    def close(self) -> None:
        """Removes hooks and buffers. Collective.

        Raises:
            MismatchError: on all ranks, their values have diverged.
        """
        _syncs[:] = [each for each in _syncs if each() is not self]
        self.replicas.close()
        self.stop()
        self._free_topology()

    def restart(self) -> None:
        """Makes the buckets anew, with parameters that were frozen before and are trained now. Collective."""
        check_same(self.world, module_signature(self._module), "the models (after a change of requires_grad)")
        self.stop()
        self._start()

    def reduce(self, failure: Exception | None = None) -> None:
        """Reduces the gradients there are; all ranks must be at the same place. Collective."""
        self.pending = self._has_gradients = False
        if failure is None:
            self.lockstep.before_reduction()
        place = Place(self._steps, self._reductions, self.dropped, *status.batch, digest_options(self._optimizers))
        self._reductions += 1
        status.batch = NO_BATCH
        if not self.finish(failure, astuple(place)):
            self._steps = self._reductions = self.dropped = 0  # a program that catches it on all ranks may go on
            raise_different(self.world, place, learning_rates(self._optimizers), self.trouble)
        self._step_check.reduced()
        self.trouble = ""
        if self._reductions == 1 or not self._optimizers:  # once a step
            self.replicas.check()

    def end_pass(self, task: int) -> None:
        """Ends a backward pass. Collective, if it is reduced."""
        self.lockstep.after_backward()
        super().end_pass(task)
        if self.pending:
            self._step_check.accumulated()

    def fail_pass(self) -> None:
        """Ends a backward pass that raised, so that training can go on if the program catches the error."""
        self.lockstep.after_backward()
        self.trouble = "an exception in backward (often out of memory)"
        super().fail_pass()

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        """Makes sure that the gradients that any optimizer is about to step are reduced. Collective.

        Returns:
            The arguments of the step, with a closure that returns the mean of the ranks' losses in place of one that
            returns this rank's, by which each rank would take steps of its own; None where there is no closure.

        Raises:
            MpidpError: gradients that cannot be reduced; the message names the parameter or the habit.
        """
        if not self.prepare_gradients(optimizer):
            return None
        self._optimizers.add(optimizer)
        return mean_loss(self.world, args, kwargs)

    def prepare_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """Makes the gradients that an optimizer is about to use the mean over ranks. Collective.

        Returns:
            Whether the optimizer holds parameters of this model.
        """
        numbers = self._step_check.held(optimizer) if self.world.size > 1 else []
        if not numbers:
            return False
        if self.hooks.is_in_pass:
            raise MpidpError(
                "an optimizer steps inside backward(), when gradients are not reduced yet: step after backward()"
            )
        elsewhere = self._step_check.elsewhere(numbers)
        if self.pending:
            self._step_check.check_untouched()
        if self.pending or self._step_check.was_set_by_hand(optimizer, elsewhere):
            self.reduce()
        for index in elsewhere:  # reduced before, and changed in other memory since
            self.buckets.take_in(index)
        return True

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Counts a step when the optimizer that holds the first parameter has stepped."""
        if self._step_check.holds_any(optimizer):
            self._steps += 1
            self._reductions = 0
            self._step_check.stepped(optimizer)
        first = next((parameter for parameter in self._module.parameters() if parameter.requires_grad), None)
        if any(parameter is first for parameter in parameters_of(optimizer)):
            self.steps_taken += 1
            # Several models, as in a GAN, count the same steps.
            status.step = max(status.step, max(0, self._first_step) + self.steps_taken)
            status.enter(BETWEEN)

    def _start(self) -> None:
        """Makes buckets of the trainable parameters and watches them. Collective."""
        named = list(self._module.named_parameters())
        self.frozen = [parameter for _, parameter in named if not parameter.requires_grad]
        trainable = [] if self._is_plain else [each for each in named if each[1].requires_grad]
        self.start(trainable[::-1])  # backward finishes the last layers first
        self._step_check = StepCheck(self._module, self.buckets)
