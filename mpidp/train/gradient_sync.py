"""The gradient synchronisation of a wrapped module, and the checks between `backward()` and the optimizer."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from mpidp.errors import MpidpError
from mpidp.reduce.choice import Choice
from mpidp.reduce.reduction import Reduction
from mpidp.train.checksum import replicated
from mpidp.train.optimizer_steps import Arguments, StepCheck, mean_loss, parameters_of, unwatch_steps, watch_steps
from mpidp.train.replicas import ReplicaCheck
from mpidp.train.same_step import Place, digest_options, learning_rates, raise_different
from mpidp.train.signature import check_same, module_signature
from mpidp.train.sync_batch_norm import Lockstep
from mpidp.world.status import BETWEEN, NO_BATCH, status
from mpidp.world.world import World


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
        self.lockstep = Lockstep(module)
        self.trouble = ""
        self.steps_taken = 0
        self._first_step = -1  # of the job, when the model was first called
        self._steps = self._reductions = 0  # see Place
        self._optimizers = weakref.WeakSet[torch.optim.Optimizer]()  # that have stepped this model
        # With the reducer "null" every rank trains a model of its own.
        self.replicas = ReplicaCheck(world, self._replicated, 0 if choice.name == "null" else compare_steps)
        self._start()
        watch_steps(self)

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
        unwatch_steps(self)
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
        if not self.finish(failure, place.numbers()):
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
            self.reduce()
        elif self._step_check.was_set_by_hand(optimizer, elsewhere):
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

    def _replicated(self) -> dict[str, Tensor]:
        return replicated(self._module, self._optimizers)
