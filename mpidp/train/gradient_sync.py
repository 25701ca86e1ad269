"""The gradients of a wrapped module, from autograd's hooks to the optimizer: accumulated, reduced, checked."""

import logging
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mpidp.errors import LaunchError, MpidpError
from mpidp.reduce.choice import Choice
from mpidp.reduce.exchange import Residuals
from mpidp.reduce.hooks import BackwardWatch
from mpidp.reduce.reduction import Reduction
from mpidp.train.checksum import replicated
from mpidp.train.optimizer_steps import StepCheck, mean_loss, unwatch_steps, watch_steps
from mpidp.train.replicas import ReplicaCheck
from mpidp.train.same_step import Place, digest_options, learning_rates, raise_different
from mpidp.train.signature import check_same, module_signature
from mpidp.train.sync_batch_norm import Lockstep
from mpidp.world import communicators
from mpidp.world.status import BETWEEN, NO_BATCH, status
from mpidp.world.topology import Topology, make_topology
from mpidp.world.world import World

log = logging.getLogger("mpidp")

# Ten times what a thread switch costs; with a longest pause of a millisecond, large buckets arrive a fifth later.
PAUSE_S = 1e-4


class GradientSync:
    """Reduces the gradients of a module, and sees to it that optimizers step reduced ones. Collective to make.

    Attributes:
        reduction: the buckets and what sums them.
        reduces: whether a backward pass that ends now is reduced, or only accumulates.
        frozen: parameters that took no gradients when the buckets were made.
        trouble: what this rank met in its last forward or backward pass and went on after, for messages.
        steps_taken: by the optimizer that holds the first trainable parameter.
        residuals: rounding errors of 16-bit communication.
        replicas: compares what must be equal on all ranks, a part at each step.

    Args:
        module: the model.
        world: the ranks.
        choice: the reducer.
        bucket_bytes: size aimed at for one bucket.
        overlap: reduce while backward runs.
        check_finite: raise on all ranks when a gradient is infinite or NaN before it is summed.
        compare_steps: in how many steps all that must be equal is compared once; 0 for never.
    """

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
        self.world, self._module, self._choice = world, module, choice
        self._bucket_bytes, self._overlap, self._check_finite = bucket_bytes, overlap, check_finite
        self.lockstep = Lockstep(module)
        self.reduces = True
        self.trouble = ""
        self.steps_taken = 0
        self._first_step = -1  # of the job, when the model was first called
        self._pending = False  # gradients were accumulated that are not the mean yet
        self._has_gradients = False  # some were, in what is pending
        self._steps = self._reductions = self._dropped = 0  # see Place
        self._optimizers = weakref.WeakSet[torch.optim.Optimizer]()  # that have stepped this model
        self._former: Reduction | None = None
        self._make_topology()
        # With the reducer "null" every rank trains a model of its own.
        self.replicas = ReplicaCheck(world, self._replicated, 0 if choice.name == "null" else compare_steps)
        self._start()
        watch_steps(self)

    @property
    def is_complete(self) -> bool:
        """Whether all gradients are the mean over ranks, as far as their memory tells."""
        buckets = self.reduction.buckets
        return not self._pending and all(map(buckets.is_in_bucket, range(len(buckets.parameters))))

    def watch_output(self, output: Any) -> None:
        """The module gave this output: backward will enter there."""
        if self._first_step < 0:
            self._first_step = status.step
        self._watch.watch_output(output)

    def close(self) -> None:
        """Takes hooks and buffers away. Collective.

        Raises:
            MismatchError: on all ranks; in the last steps they have come to hold different values.
        """
        unwatch_steps(self)
        self.replicas.close()
        self._stop()
        if self._own_topology and not communicators.is_elastic():  # it may have ranks that died
            self._own_topology.free()

    def rebuild(self) -> None:
        """Reduces over those that are left, after the world lost ranks; drops gradients. Collective."""
        self._watch.remove()
        self.reduction.abandon()
        # Until the next loss, as a message to these buffers may still be on its way.
        self._former = self.reduction
        for parameter in self._module.parameters():
            parameter.grad = None
        self._pending, self.reduces = False, True
        # Survivors may have met the death in different reductions, and are at the end of the same step now.
        self._steps = self._reductions = self._dropped = 0
        self.replicas.rebuild()
        self.lockstep.rebuild()
        self._make_topology()
        self._start()

    def restart(self) -> None:
        """Takes in parameters that were frozen at the start and are trained from now on. Collective."""
        check_same(self.world, module_signature(self._module), "the models (after a change of requires_grad)")
        self._stop()
        self._start()

    def reduce(self, failure: Exception | None = None) -> None:
        """Reduces the gradients there are; all ranks must be at the same place. Collective."""
        self._pending = self._has_gradients = False
        if failure is None:
            self.lockstep.before_reduction()
        place = Place(self._steps, self._reductions, self._dropped, *status.batch, digest_options(self._optimizers))
        self._reductions += 1
        status.batch = NO_BATCH
        if not self.reduction.finish(failure, place.numbers()):
            self._steps = self._reductions = self._dropped = 0  # whoever catches it on all ranks may go on
            raise_different(self.world, place, learning_rates(self._optimizers), self.trouble)
        self._step_check.reduced()
        self.trouble = ""
        if self._reductions == 1 or not self._optimizers:  # once a step
            self.replicas.check()

    def on_gradient(self, index: int) -> None:
        """Called by autograd's hooks: a gradient is about to be accumulated."""
        self._has_gradients = True
        self.reduction.expect(index)

    def on_begin(self) -> None:
        """Called by autograd's hooks: a backward pass has come to the first parameter."""
        if self._has_gradients and all(parameter.grad is None for parameter in self.reduction.buckets.parameters):
            self._dropped += 1
            self._has_gradients = False

    def on_ready(self, index: int, task: int) -> None:
        """Called by autograd's hooks: a gradient is complete."""
        if self.reduces and status.accumulating_pass != task:
            self.reduction.ready(index)

    def on_end(self, task: int) -> None:
        """Called by autograd's hooks: a backward pass is over."""
        self._pending = True
        self.lockstep.after_backward()
        if self.reduces and status.accumulating_pass != task:
            self.reduce()
        else:
            self._step_check.accumulated()

    def on_failure(self) -> None:
        """Called when a backward pass raised: whoever catches that must find a wrapper at rest."""
        self.lockstep.after_backward()
        self.trouble = "an exception in backward (often out of memory)"
        if not self.reduction.has_begun:
            return
        try:  # the other ranks wait for all buckets of this pass
            self.reduce(MpidpError("a backward pass failed half-way, when some gradients were on their way already"))
        except Exception as error:  # the user's own exception is on its way
            log.info("%s", error)

    def on_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Called before an optimizer steps: sees to it that the gradients it will use are reduced. Collective.

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
        if self._watch.is_in_pass:
            raise MpidpError(
                "an optimizer steps inside backward(), when gradients are not reduced yet: step after backward()"
            )
        astray = self._step_check.astray(numbers)
        if self._pending:
            self._step_check.check_untouched()
            self.reduce()
        elif self._step_check.was_set_by_hand(optimizer, astray):
            self.reduce()
        for index in astray:  # reduced before, and changed in other memory since
            self.reduction.buckets.take_in(index)
        return True

    def on_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after an optimizer stepped: a step is over when the one that holds the first parameter did so."""
        if self._step_check.holds_any(optimizer):
            self._steps += 1
            self._reductions = 0
            self._step_check.stepped(optimizer)
        first = next((parameter for parameter in self._module.parameters() if parameter.requires_grad), None)
        if any(parameter is first for group in optimizer.param_groups for parameter in group["params"]):
            self.steps_taken += 1
            # Several models, as in a GAN, count the same steps.
            status.step = max(status.step, max(0, self._first_step) + self.steps_taken)
            status.enter(BETWEEN)

    def _start(self) -> None:
        """Makes buckets of the trainable parameters and watches them. Collective."""
        trainable = [
            (name, parameter) for name, parameter in self._module.named_parameters() if parameter.requires_grad
        ]
        self.frozen = [parameter for parameter in self._module.parameters() if not parameter.requires_grad]
        trainable.reverse()  # backward finishes the last layers first
        if self.world.size == 1 and self._choice.name == "null" and not self._check_finite:
            trainable = []  # one rank is plain torch: no hook, no buffer
        # A helper thread that waits for the network must leave the core to backward.
        pause_s = PAUSE_S if self._overlap and self.world.device.type == "cpu" else 0.0
        self.residuals = Residuals()
        options = replace(self._choice.options, pause_s=pause_s, residuals=self.residuals)
        reducer = replace(self._choice, options=options).make(self._reducing_world)
        self.reduction = Reduction(
            self._reducing_world, trainable, reducer, self._bucket_bytes, self._overlap, self._check_finite
        )
        self._step_check = StepCheck(self._module, self.reduction.buckets)
        self._watch = BackwardWatch(self.reduction.buckets.parameters, self, tell_ready=self._overlap)

    def _replicated(self) -> dict[str, Tensor]:
        return replicated(self._module, self._optimizers)

    def _stop(self) -> None:
        self._watch.remove()
        self.reduction.close()

    def _make_topology(self) -> None:
        """A helper thread needs communicators that nobody else calls, that of another wrapper included. Collective."""
        self._own_topology: Topology | None = None
        self._reducing_world = self.world
        if self._overlap:
            if not self.world.all(self.world.threads_may_call):
                raise LaunchError(
                    "overlap=True needs MPI_THREAD_MULTIPLE, which this MPI was not started with: call mpidp.init() "
                    "before anything else starts MPI, or use overlap=False"
                )
            self._own_topology = make_topology(self.world.comm)
            self._reducing_world = replace(self.world, topology=self._own_topology)
