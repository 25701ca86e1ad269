"""A model in, the same model out whose gradients are the mean over all ranks whenever `backward()` returns."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

import mpidp
from mpidp.errors import LaunchError
from mpidp.reduce.buckets import Buckets
from mpidp.reduce.choice import Choice, decide, make_reducer, wants_overlap
from mpidp.reduce.feedback import Residuals
from mpidp.reduce.options import ReducerOptions
from mpidp.reduce.reducer import Reducer
from mpidp.reduce.reduction import Reduction
from mpidp.train.batch_norm.lockstep import Lockstep
from mpidp.train.broadcast import broadcast_module
from mpidp.train.parallel.backward import BackwardWatch
from mpidp.train.parallel.step_watch import StepWatch
from mpidp.train.signature import check_same, check_supported, module_signature
from mpidp.world import tolerance
from mpidp.world.abort import SHARED_MARK
from mpidp.world.status import BETWEEN, status
from mpidp.world.topology import Topology, make_topology
from mpidp.world.world import World

T = TypeVar("T")

# Several buckets for a model of any size, so that the first leaves early, and each large enough for full bandwidth.
BUCKET_BYTES = 8 << 20
# Ten times what a thread switch costs; with a longest pause of a millisecond, large buckets arrive a fifth later.
PAUSE_S = 1e-4


class DataParallel(nn.Module):
    """Wraps a module so that each rank trains it on its share of the global batch. Construction is collective.

    All ranks must hold the same parameters (checked); they get the values of rank 0. Afterwards, each time
    `backward()` returns outside `no_sync()`, every `p.grad` is the mean over ranks, and clipping, GradScaler and any
    optimizer work as on one GPU. Parameters that no rank used keep `grad is None`; those used on some ranks only are
    zero on the others, which must use at least one parameter of the module (their `backward()` is how they take part).
    `forward` communicates nothing, but for the first one that trains parameters which were frozen before, and for
    layers of `SyncBatchNorm` in training: then all ranks must call it equally often before each reduction.

    An exception out of `backward()` may be caught, and training go on, only if all ranks met it in the same step.

    Args:
        module: the model, on `world.device`.
        world: the ranks.
        reducer: "auto" (measures at start), "naive", "flat", "node", "staged" or "null".
        bucket_bytes: how many bytes of gradients share a buffer.
        wire: "full", or "bf16" or "fp16": float32 gradients travel in 16 bits and are summed in 32.
        error_feedback: with a 16-bit wire, add what rounding lost to the next step's gradient.
        piece_bytes: the largest buffer given to one call of MPI; 0 leaves it to "auto", or to the kind of network.
        overlap: reduce while backward still runs; None leaves it to the facts.
        check_finite: raise FloatingPointError, on all ranks, naming parameter and rank, when a gradient is infinite or
            NaN before it is summed. Not for use with GradScaler, which expects such gradients and skips the step.
        quiet: do not print what "auto" chose; whoever asks for this shows `choice` in its own way.

    Raises:
        MpidpError: no trainable parameter; sparse gradients; parameters off `world.device`.
        MismatchError: the ranks' modules or options differ.
        LaunchError: the reducer cannot work here.
    """

    def __init__(
        self,
        module: nn.Module,
        world: World,
        *,
        reducer: str = "auto",
        bucket_bytes: int = BUCKET_BYTES,
        wire: str = "full",
        error_feedback: bool = False,
        piece_bytes: int = 0,
        overlap: bool | None = None,
        check_finite: bool = False,
        quiet: bool = False,
    ):
        super().__init__()
        self.module = module
        self.world = world
        self._bucket_bytes = bucket_bytes
        self._check_finite = check_finite
        with world.together("wrapping the model"):
            check_supported(module, world)
        options = ReducerOptions(piece_bytes, wire, error_feedback, share_memory=not tolerance.is_on())
        told = (
            f"reducer={reducer}, bucket_bytes={bucket_bytes}, overlap={overlap}, check_finite={check_finite}, {options}"
        )
        check_same(world, [told, *module_signature(module)], "the models")
        check_same(world, [f"mpidp {mpidp.__version__}, torch {torch.__version__}"], "the versions")
        broadcast_module(module, world)
        num_bytes = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        self.choice: Choice = decide(world, reducer, options, num_bytes)
        self.overlap = wants_overlap(world, self.choice) if overlap is None else overlap
        if reducer == "auto" and not quiet:
            world.say(f"reducer {self.choice}")
        # A helper thread needs communicators that nobody else calls, the thread of another wrapper included.
        self._own_topology = self._make_own_topology() if self.overlap else None
        self._reducing_world = replace(world, topology=self._own_topology) if self._own_topology else world
        self._reduces: bool = True
        self._former: Reduction | None = None
        self._pending: bool = False  # gradients were accumulated that are not the mean yet
        self._lockstep = Lockstep(module)
        self._buffers_before: dict[str, Tensor] | None = None  # a step that is not over, if any
        self._start()
        self._step_watch = StepWatch(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        if torch.is_grad_enabled():
            status.enter("forward")
        if self.training and torch.is_grad_enabled() and any(p.requires_grad for p in self._frozen):
            self._restart()
        self._lockstep.before_forward()
        if tolerance.is_on() and self.training and self._buffers_before is None:
            self._buffers_before = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        output = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            self._watch.watch_output(output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes that end inside this block only accumulate; the next one outside reduces the whole sum.

        It is where `backward()` runs that counts, not where `forward` did. An optimizer step that finds gradients
        accumulated but not reduced reduces them first, so an accumulation cut short by the end of an epoch is right.
        (Whoever clips in between calls `synchronize()` before.)
        """
        before = self._reduces
        self._reduces = False
        try:
            yield
        finally:
            self._reduces = before

    def synchronize(self) -> None:
        """Makes accumulated gradients the mean over ranks now. Collective. Does nothing when they already are."""
        if self._pending:
            self._pending = False
            self._lockstep.before_reduction()
            self._reduction.finish()

    def fail(self, error: Exception) -> NoReturn:
        """Takes part in this step without gradients, so that nobody waits, and raises the error. Collective.

        The other ranks, which call `backward()` for this step, raise the same there. Nothing has changed the model
        then: whoever catches it on all ranks may go on, or save.

        With layers of `SyncBatchNorm` they raise it when they call the model. Once this rank has called it itself, they
        may be in any of its layers: then the error is raised here alone, which ends the job unless it is caught.
        """
        self._pending = False
        self._lockstep.fail(error)
        self._reduction.finish(error)
        raise AssertionError("an error was shared and not raised") from error

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """The batches of a loader; when one rank cannot have its own, all ranks raise why, in that step.

        Without it, such a rank ends the job: the others are on their way into the reduction. Every rank must take the
        same number of batches, and call `backward()` once for each.

        Raises:
            Exception: on all ranks, what the loader of the lowest failing rank raised.
        """
        iterator = iter(loader)
        while True:
            with status.during("data"):
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                except Exception as error:
                    # All ranks know already, or the others wait for this one in the loader itself.
                    if getattr(error, SHARED_MARK, False) or getattr(loader, "mode", "") == "store":
                        raise
                    self.fail(error)
            yield batch

    def unwrap(self) -> nn.Module:
        """Takes hooks and buffers away and returns the module, clean, with its gradients its own. Collective."""
        self._step_watch.remove()
        self._stop()
        if self._own_topology and not tolerance.is_on():  # it may have ranks that died
            self._own_topology.free()
        return self.module

    def rebuild(self) -> None:
        """Reduces over those that are left, after `world` lost ranks. Collective.

        Gradients are dropped, as those of the step that was broken off are means of some ranks only. So are the
        rounding errors of a 16-bit wire: they belong to another number of ranks. Buffers, such as running statistics,
        are again what they were at the end of the last step that was taken.
        """
        self._watch.remove()
        self._reduction.abandon()
        # Until the next loss, as a message to these buffers may still be on its way.
        self._former = self._reduction
        for parameter in self.module.parameters():
            parameter.grad = None
        self._pending, self._reduces = False, True
        self._lockstep.rebuild()
        # Some ranks have learnt of the step that was broken off, and all will once more.
        for name, buffer in self.module.named_buffers():
            if self._buffers_before is not None and name in self._buffers_before:
                buffer.copy_(self._buffers_before[name])
        self._buffers_before = None
        self._own_topology = self._make_own_topology() if self.overlap else None
        self._reducing_world = replace(self.world, topology=self._own_topology) if self._own_topology else self.world
        self._start()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own state, without a prefix: it loads in plain torch."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Loads a state of the plain module."""
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def rank_state_dict(self) -> dict[str, Any]:
        """What only this rank has: the rounding errors of a 16-bit wire, and the layout that they belong to."""
        return {"layout": self._layout(), "residuals": self._residuals.tensors()}

    def load_rank_state_dict(self, state: dict[str, Any]) -> bool:
        """Goes on with another run's rounding errors; False if its layout differs, so that they mean nothing here.

        To be called before the first backward pass, on every rank.
        """
        if state["layout"] != self._layout():
            return False
        self._residuals.load(state["residuals"])
        return True

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's own names, without a prefix."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The module's own names, without a prefix."""
        return self.module.named_buffers(*args, **kwargs)

    @property
    def buckets(self) -> Buckets:
        """The flat gradient buffers."""
        return self._reduction.buckets

    @property
    def reducer(self) -> Reducer:
        """The strategy that sums the buckets."""
        return self._reduction.reducer

    @property
    def reduce_s(self) -> float:
        """Seconds that the training thread has spent so far in reducing, or in waiting for it."""
        return self._reduction.seconds

    def on_gradient(self, index: int) -> None:
        """Called by autograd's hooks: a gradient is about to be accumulated."""
        self._reduction.expect(index)

    def on_ready(self, index: int) -> None:
        """Called by autograd's hooks: a gradient is complete."""
        if self._reduces:
            self._reduction.ready(index)

    def on_end(self) -> None:
        """Called by autograd's hooks: a backward pass is over."""
        self._pending = True
        self._lockstep.after_backward()
        if self._reduces:
            self.synchronize()

    def on_failure(self) -> None:
        """Called when a backward pass raised: whoever catches that must find a wrapper at rest."""
        self._lockstep.after_backward()
        self._reduction.give_up()

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before an optimizer steps: reduces what was accumulated but not reduced, if it holds any of it."""
        if not self._pending:
            return
        ours = {id(parameter) for parameter in self.buckets.parameters}
        if any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
            self.synchronize()

    def on_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after an optimizer stepped: a step is over when the one that holds the first parameter did so."""
        first = next((parameter for parameter in self.module.parameters() if parameter.requires_grad), None)
        if any(parameter is first for group in optimizer.param_groups for parameter in group["params"]):
            status.step += 1
            status.enter(BETWEEN)
            self._buffers_before = None

    def _start(self) -> None:
        """Makes buckets of the trainable parameters and watches them. Collective."""
        trainable = [(name, parameter) for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        self._frozen = [parameter for parameter in self.module.parameters() if not parameter.requires_grad]
        trainable.reverse()  # backward finishes the last layers first
        if self.world.size == 1 and self.choice.name == "null" and not self._check_finite:
            trainable = []  # one rank is plain torch: no hook, no buffer
        # A helper thread that waits for the network must leave the core to backward.
        pause_s = PAUSE_S if self.overlap and self.world.device.type == "cpu" else 0.0
        self._residuals = Residuals()
        options = replace(self.choice.options, pause_s=pause_s, residuals=self._residuals)
        reducer = make_reducer(self._reducing_world, replace(self.choice, options=options))
        self._reduction = Reduction(
            self._reducing_world, trainable, reducer, self._bucket_bytes, self.overlap, self._check_finite
        )
        self._watch = BackwardWatch(self._reduction.buckets.parameters, self, tell_ready=self.overlap)

    def _layout(self) -> str:
        """All that decides how many elements each rank rounds for the wire, in words."""
        world, buckets = self.world, self.buckets.buckets
        return (
            f"{world.size} ranks on {world.num_nodes} nodes, {self.choice.name}, {self.choice.options}, "
            f"buckets of {[bucket.layout.numel for bucket in buckets]}"
        )

    def _make_own_topology(self) -> Topology:
        if not self.world.all(self.world.threads_may_call):
            raise LaunchError(
                "overlap=True needs MPI_THREAD_MULTIPLE, which this MPI was not started with: call mpidp.init() before "
                "anything else starts MPI, or use overlap=False"
            )
        return make_topology(self.world.comm)

    def _stop(self) -> None:
        self._watch.remove()
        self._reduction.close()

    def _restart(self) -> None:
        """Takes in parameters that were frozen at the start and are trained from now on. Collective."""
        check_same(self.world, module_signature(self.module), "the models (after a change of requires_grad)")
        self._stop()
        self._start()
