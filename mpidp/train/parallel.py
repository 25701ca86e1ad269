"""A model in, the same model out whose gradients are the mean over all ranks whenever `backward()` returns."""

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from mpidp.errors import MpidpError
from mpidp.reduce.buckets import Buckets
from mpidp.reduce.options import ReducerOptions
from mpidp.reduce.reducer import make_reducer
from mpidp.train.broadcast import broadcast_module
from mpidp.train.signature import check_same, module_signature
from mpidp.world.world import World

BUCKET_BYTES = 25 << 20


class DataParallel(nn.Module):
    """Wraps a module so that each rank trains it on its share of the global batch. Construction is collective.

    All ranks must hold the same parameters (checked); they get the values of rank 0. Afterwards, each time
    `backward()` returns outside `no_sync()`, every `p.grad` is the mean over ranks, and clipping, GradScaler and any
    optimizer work as on one GPU. Parameters that no rank used keep `grad is None`. `forward` adds nothing and
    communicates nothing.

    Args:
        module: the model, on `world.device`.
        world: the ranks.
        reducer: "auto", "naive", "flat", "staged" or "null".
        bucket_bytes: how many bytes of gradients share a buffer.
        quiet: do not print which reducer "auto" chose; whoever asks for this shows `choice` in its own way.

    Raises:
        MpidpError: no trainable parameter; sparse gradients; parameters off `world.device`.
        MismatchError: the ranks' modules differ.
        LaunchError: the reducer cannot work here.
    """

    def __init__(
        self,
        module: nn.Module,
        world: World,
        *,
        reducer: str = "auto",
        bucket_bytes: int = BUCKET_BYTES,
        quiet: bool = False,
    ):
        super().__init__()
        self.module = module
        self.world = world
        self.bucket_bytes = bucket_bytes
        with world.together("wrapping the model"):
            check_supported(module, world)
        check_same(
            world,
            [f"reducer={reducer}, bucket_bytes={bucket_bytes}", *module_signature(module)],
            "the models",
        )
        broadcast_module(module, world)
        self.reducer, self.choice = make_reducer(reducer, world, ReducerOptions())
        if reducer == "auto" and not quiet:
            world.say(f"reducer {self.choice.name}: {self.choice.reason}")
        self.reduce_s = 0.0  # time spent in packing, reducing and unpacking, for the trainer's metrics
        self._reduces: bool = True
        self._pending = False  # gradients were accumulated that are not the mean yet
        self._pass: weakref.ref[_PassEnd] | None = None  # the autograd pass whose end will reduce
        self._reached = False  # whether that pass has come to a parameter
        self._handles: list[RemovableHandle] = []
        self._watch_parameters()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        if any(parameter.requires_grad for parameter in self._frozen):
            self._rebuild()
        output = self.module(*args, **kwargs)
        if torch.is_grad_enabled() and self._sends:
            self._watch_output(output)
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
            self._reduce()

    def unwrap(self) -> nn.Module:
        """Takes the hooks and buffers away and returns the module, clean, with its gradients its own."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._buckets.release()
        return self.module

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own state, without a prefix: it loads in plain torch."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Loads a state of the plain module."""
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's own names, without a prefix."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The module's own names, without a prefix."""
        return self.module.named_buffers(*args, **kwargs)

    @property
    def buckets(self) -> Buckets:
        """The flat gradient buffers."""
        return self._buckets

    @property
    def _sends(self) -> bool:
        """Whether gradients leave this rank at all. One rank under "auto" is plain torch: no hook, no buffer."""
        return bool(self._accumulators)

    def _watch_parameters(self) -> None:
        """Hooks the place where autograd accumulates each trainable parameter's gradient."""
        trainable = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self._frozen = [parameter for parameter in self.module.parameters() if not parameter.requires_grad]
        trainable.reverse()  # backward finishes the last layers first
        self._accumulators: list[Any] = []  # a parameter holds its accumulator only weakly, and the hooks with it
        if self.world.size == 1 and self.choice.name == "null":
            trainable = []
        self._buckets = Buckets(trainable, self.bucket_bytes, self.reducer.allocate)
        for index, parameter in enumerate(trainable):
            accumulator = get_gradient_edge(parameter).node
            self._accumulators.append(accumulator)
            self._handles.append(accumulator.register_prehook(_GradientHook(self, index)))
        self._handles.append(register_optimizer_step_pre_hook(_StepHook(self)))

    def _rebuild(self) -> None:
        """Takes in parameters that were frozen at the start and are trained from now on. Collective."""
        self.unwrap()
        check_same(self.world, module_signature(self.module), "the models (after a change of requires_grad)")
        self._watch_parameters()

    def _watch_output(self, output: Any) -> None:
        """Asks to be called when backward enters the module.

        The hooks at the parameters would suffice, but for reentrant activation checkpointing, which accumulates
        inside nested backward passes: the pass to wait for is the outer one, and that enters here first.
        """
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(_OutputHook(self))

    def _on_enter(self) -> None:
        task = torch._C._current_graph_task_id()
        running = self._running_pass()
        if running is None or running.task != task:
            self._reached = False
            end = _PassEnd(self, task)
            self._pass = weakref.ref(end)
            _call_at_end_of_backward(end)

    def _running_pass(self) -> "_PassEnd | None":
        """The pass we wait for; None when there is none, or it failed and autograd has forgotten it."""
        return self._pass() if self._pass else None

    def _on_gradient(self, index: int, gradients: tuple[Tensor | None, ...]) -> None:
        """Runs before a gradient is accumulated. None is the gradient of a batch without samples: it adds nothing."""
        if self._running_pass() is None:
            self._on_enter()
        self._reached = True
        if gradients[0] is not None:
            self._buckets.expect(index)

    def _on_end(self) -> None:
        """Runs when a backward pass is over. `torch.autograd.grad` reaches no parameter, and reduces nothing."""
        self._pass = None
        if not self._reached:
            return
        self._pending = True
        if self._reduces:
            self._reduce()

    def _reduce(self) -> None:
        start = time.perf_counter()
        with torch.no_grad():
            for bucket in self._buckets.buckets:
                self._buckets.pack(bucket)
                self.reducer.mean(bucket)
                self._buckets.unpack(bucket)
        self._pending = False
        self.reduce_s += time.perf_counter() - start


class _PassEnd:
    """Tells the wrapper that a backward pass is over. Autograd alone keeps it, and only as long as the pass."""

    def __init__(self, parallel: DataParallel, task: int):
        self._parallel = parallel
        self.task = task

    def __call__(self) -> None:
        self._parallel._on_end()


class _OutputHook:
    """Tells the wrapper that a backward pass has come to an output of the module."""

    def __init__(self, parallel: DataParallel):
        # The graph keeps this hook as long as somebody keeps the output, which may be the module itself.
        self._parallel = weakref.ref(parallel)

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        parallel = self._parallel()
        if parallel is not None:
            parallel._on_enter()


class _GradientHook:
    """Tells the wrapper that autograd reached parameter `index`."""

    def __init__(self, parallel: DataParallel, index: int):
        # Autograd's graph keeps this hook where the garbage collector does not see; it must not keep the model.
        self._parallel = weakref.ref(parallel)
        self._index = index

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        parallel = self._parallel()
        if parallel is not None:
            parallel._on_gradient(self._index, gradients)


class _StepHook:
    """Reduces what was accumulated but not reduced, before any optimizer that holds such parameters steps."""

    def __init__(self, parallel: DataParallel):
        # torch keeps this hook for ever; it must not keep the model.
        self._parallel = weakref.ref(parallel)

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        parallel = self._parallel()
        if parallel is None or not parallel._pending:
            return
        ours = {id(parameter) for parameter in parallel.buckets.parameters}
        if any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
            parallel.synchronize()


def check_supported(module: nn.Module, world: World) -> None:
    """Raises MpidpError for a module whose gradients cannot be reduced, naming the parameter."""
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    if not named:
        raise MpidpError(
            f"the model {type(module).__name__} has no trainable parameter: nothing to train. "
            f"Check requires_grad, and that layers are attributes of the module."
        )
    for name, parameter in named:
        if parameter.device != world.device:
            raise MpidpError(
                f"parameter {name} is on {parameter.device}, this rank's device is {world.device}: "
                f"move the model with .to(world.device) before wrapping it."
            )
    for name, layer in module.named_modules():
        if getattr(layer, "sparse", False) and isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            raise MpidpError(
                f"layer {name or type(layer).__name__} has sparse=True: sparse gradients are not reduced. "
                f"Use sparse=False."
            )


def _call_at_end_of_backward(function: Callable[[], None]) -> None:
    """Torch's own DDP and FSDP end their backward passes by this door, too; there is no public one."""
    torch.autograd.Variable._execution_engine.queue_callback(function)
