"""Hooks in autograd that tell when a gradient comes, and when a backward pass is over.

Autograd holds them where the garbage collector does not look, so they hold their listener weakly.
"""

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from mpidp.world.status import status


class Listener(Protocol):
    """Who wants to know."""

    def on_gradient(self, index: int) -> None:
        """A gradient of parameter `index` is about to be accumulated."""

    def on_begin(self) -> None:
        """A backward pass has come to its first parameter."""

    def on_ready(self, index: int, task: int) -> None:
        """Parameter `index` has all the gradient that pass `task` has for it, be it none."""

    def on_end(self, task: int) -> None:
        """Backward pass `task` is over that came to a parameter, or passed an output on its way to other ones."""

    def on_failure(self) -> None:
        """A backward pass failed half-way; its exception is on its way to the user."""


class BackwardWatch:
    """Watches the parameters, and those backward passes that come to them.

    `torch.autograd.grad`, which accumulates nothing, is not reported. Of nested passes (reentrant activation
    checkpointing) only the end of the outer one is, and only what it accumulates itself is ever ready before its end.

    Args:
        parameters: what to watch.
        listener: is told; held weakly.
        tell_ready: whether `on_ready` is wanted; it costs a call for each parameter in each pass.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], listener: Listener, tell_ready: bool):
        self.listener = weakref.ref(listener)
        self.handles: list[RemovableHandle] = []
        self._accumulators: list[Any] = []  # a parameter holds its accumulator only weakly, and the hooks with it
        self._pass: weakref.ref[_Pass] | None = None
        self._parameters = list(parameters)
        for index, parameter in enumerate(parameters):
            accumulator = get_gradient_edge(parameter).node
            self._accumulators.append(accumulator)
            self.handles.append(accumulator.register_prehook(_BeforeAccumulation(self, index)))
            if tell_ready:
                after = _AfterAccumulation(self, index)
                self.handles.append(parameter.register_post_accumulate_grad_hook(after))  # type: ignore[no-untyped-call]

    def watch_output(self, output: Any) -> None:
        """Asks to be called when backward enters the module, so that of nested passes the outer one is known."""
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(_Entry(self))

    def remove(self) -> None:
        """Takes all hooks away."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self._accumulators.clear()
        self._parameters.clear()

    @property
    def is_in_pass(self) -> bool:
        """Whether a backward pass is under way that came to a parameter."""
        running = self._running()
        return running is not None and running.came_to_parameter

    @property
    def is_training(self) -> bool:
        """Whether some parameter takes gradients at the moment."""
        return any(parameter.requires_grad for parameter in self._parameters)

    def enter(self, output: Node | None = None) -> None:
        """A backward pass has come to an output, or to a parameter without passing an output."""
        task = torch._C._current_graph_task_id()
        running = self._running()
        if running is None or running.task != task:
            status.enter("backward")
            end = _Pass(self, task, output)
            self._pass = weakref.ref(end)
            _call_at_end_of_backward(end)

    def before_accumulation(self, index: int, gradient: Tensor | None) -> None:
        """None is the gradient of a batch without samples: it adds nothing."""
        if self._running() is None:
            self.enter()
        running, listener = self._running(), self.listener()
        assert running is not None
        if listener is not None and not running.came_to_parameter:
            listener.on_begin()
        running.came_to_parameter = True
        if gradient is not None and listener is not None:
            listener.on_gradient(index)

    def after_accumulation(self, index: int) -> None:
        """Runs for parameters whose gradient is None, too."""
        running, listener = self._running(), self.listener()
        if running is not None and listener is not None and running.task == torch._C._current_graph_task_id():
            listener.on_ready(index, running.task)

    def _running(self) -> "_Pass | None":
        """The pass we wait for; None when there is none, or it failed and autograd has forgotten it."""
        return self._pass() if self._pass else None


class _Pass:
    """A backward pass. Autograd alone keeps it, as long as it runs, and calls it at the end."""

    def __init__(self, watch: BackwardWatch, task: int, output: Node | None):
        self._watch = watch
        self._output = output
        self.task = task
        self.came_to_parameter = self.is_over = False

    def __call__(self) -> None:
        self.is_over = True
        self._watch._pass = None
        listener = self._watch.listener()
        if listener is not None and (self.came_to_parameter or self._passed_by()):
            listener.on_end(self.task)

    def _passed_by(self) -> bool:
        """Whether this rank's output used no parameter at all, in a step in which other ranks' outputs may."""
        return self._output is not None and self._watch.is_training and _accumulates(self._output)

    def __del__(self) -> None:
        listener = self._watch.listener()
        if self.is_over or listener is None:
            return
        if self._watch._running() is self:  # also where an exception's traceback keeps this object
            self._watch._pass = None
        listener.on_failure()


class _Entry:
    """At an output of the module. The graph keeps it as long as somebody keeps the output."""

    def __init__(self, watch: BackwardWatch):
        self._watch = weakref.ref(watch)

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        watch = self._watch()
        if watch is not None:
            watch.enter(torch._C._current_autograd_node())


class _BeforeAccumulation:
    def __init__(self, watch: BackwardWatch, index: int):
        self._watch = weakref.ref(watch)
        self._index = index

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        watch = self._watch()
        if watch is not None:
            watch.before_accumulation(self._index, gradients[0])


class _AfterAccumulation:
    def __init__(self, watch: BackwardWatch, index: int):
        self._watch = weakref.ref(watch)
        self._index = index

    def __call__(self, parameter: Tensor) -> None:
        watch = self._watch()
        if watch is not None:
            watch.after_accumulation(self._index)


def _call_at_end_of_backward(end: _Pass) -> None:
    """Torch's own DDP and FSDP end their backward passes by this door, too; there is no public one."""
    torch.autograd.Variable._execution_engine.queue_callback(end)


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
