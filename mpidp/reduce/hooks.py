"""Autograd hooks that tell a reduction when a gradient is ready, and when a backward pass is over.

Autograd holds them where the garbage collector cannot see them, so they refer to the reduction weakly.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from mpidp.world.status import status

if TYPE_CHECKING:
    from mpidp.reduce.reduction import Reduction


class Hooks:
    """The hooks on a model's parameters and outputs, and the running backward pass, if any.

    `torch.autograd.grad`, which accumulates nothing, is not reported. Of nested passes (reentrant activation
    checkpointing) only the end of the outer one is, and only what it accumulates itself is ever ready before its end.

    Args:
        parameters: those to watch.
        reduction: its `begin_pass`, `expect`, `ready`, `end_pass` and `fail_pass` are called.
        tell_ready: whether to call `ready`, once for each parameter in each pass.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], reduction: "Reduction", tell_ready: bool):
        self.reduction = weakref.ref(reduction)
        self._parameters = list(parameters)
        self._handles: list[RemovableHandle] = []
        self._accumulators: list[Any] = []  # a parameter holds its accumulator only weakly, and the hooks with it
        self._pass: weakref.ref[_Pass] | None = None
        for index, parameter in enumerate(parameters):
            accumulator = get_gradient_edge(parameter).node
            self._accumulators.append(accumulator)
            self._handles.append(accumulator.register_prehook(_weak(Hooks._before_accumulation, self, index)))
            if tell_ready:
                after = _weak(Hooks._after_accumulation, self, index)
                self._handles.append(parameter.register_post_accumulate_grad_hook(after))  # type: ignore[no-untyped-call]

    def watch_output(self, output: Any) -> None:
        """Adds hooks where backward will enter the module, so that of nested passes the outer one is known."""
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(_weak(Hooks._enter, self))

    def remove(self) -> None:
        """Removes all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._accumulators.clear()
        self._parameters.clear()

    @property
    def is_in_pass(self) -> bool:
        """Whether a backward pass is running that has reached a parameter."""
        running = self.running()
        return running is not None and running.came_to_parameter

    @property
    def is_training(self) -> bool:
        """Whether some parameter takes gradients at the moment."""
        return any(parameter.requires_grad for parameter in self._parameters)

    def running(self) -> "_Pass | None":
        """The running pass; None when there is none, or it failed and autograd has dropped it."""
        return self._pass() if self._pass else None

    def forget(self) -> None:
        """Ends the running pass."""
        self._pass = None

    def _enter(self, gradients: Any = None) -> None:
        """Begins a pass: backward has reached an output, or a parameter without passing an output."""
        task = torch._C._current_graph_task_id()
        running = self.running()
        if running is None or running.task != task:
            status.enter("backward")
            end = _Pass(self, task, None if gradients is None else torch._C._current_autograd_node())
            self._pass = weakref.ref(end)
            # Not public, but torch's own DDP and FSDP use it for the end of their backward passes; there is no other
            # way.
            torch.autograd.Variable._execution_engine.queue_callback(end)

    def _before_accumulation(self, gradients: tuple[Tensor | None, ...], index: int) -> None:
        """None is the gradient of a batch without samples: it adds nothing."""
        running, reduction = self.running(), self.reduction()
        if running is None:
            self._enter()
            running = self.running()
            assert running is not None
        if reduction is not None and not running.came_to_parameter:
            reduction.begin_pass()
        running.came_to_parameter = True
        if gradients[0] is not None and reduction is not None:
            reduction.expect(index)

    def _after_accumulation(self, parameter: Tensor, index: int) -> None:
        """Also called for parameters whose gradient is None."""
        running, reduction = self.running(), self.reduction()
        if running is not None and reduction is not None and running.task == torch._C._current_graph_task_id():
            reduction.ready(index, running.task)


class _Pass:
    """A backward pass. Only autograd holds a reference, as long as it runs, and calls it at the end."""

    def __init__(self, hooks: Hooks, task: int, output: Node | None):
        self._hooks = hooks
        self._output = output
        self.task = task
        self.came_to_parameter = self._is_over = False

    def __call__(self) -> None:
        self._is_over = True
        self._hooks.forget()
        reduction = self._hooks.reduction()
        if reduction is not None and (self.came_to_parameter or self._used_no_parameter()):
            reduction.end_pass(self.task)

    def _used_no_parameter(self) -> bool:
        """Whether this rank's output used no parameter at all, in a step in which other ranks' outputs may."""
        return self._output is not None and self._hooks.is_training and _accumulates(self._output)

    def __del__(self) -> None:
        reduction = self._hooks.reduction()
        if self._is_over or reduction is None:
            return
        if self._hooks.running() is self:  # also where an exception's traceback keeps this object
            self._hooks.forget()
        reduction.fail_pass()


def _weak(function: Callable[..., None], hooks: Hooks, *arguments: Any) -> Callable[[Any], None]:
    """A hook that calls a method of `hooks` with what autograd gives, as long as that object lives."""
    reference = weakref.ref(hooks)

    def call(given: Any) -> None:
        living = reference()
        if living is not None:
            function(living, given, *arguments)

    return call


def _accumulates(node: Node) -> bool:
    """Whether the running pass adds to gradients of what lies behind the node; `torch.autograd.grad` does not.

    Only autograd knows, and it tells of one node at a time: of the first leaf that is found.
    """
    seen = {node}
    todo = [node]
    while todo:
        here = todo.pop()
        if hasattr(here, "variable"):
            try:
                return bool(torch._C._will_engine_execute_node(here))
            except RuntimeError:  # its answer for any leaf in `torch.autograd.grad`
                return False
        behind = {node for node, _ in here.next_functions if node is not None} - seen
        seen |= behind
        todo.extend(behind)
    return False
