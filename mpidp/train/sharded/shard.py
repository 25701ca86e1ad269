"""One rank's shard: an optimizer over runs of the parameters' elements, and which optimizers allow it. No MPI."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mpidp.errors import MpidpError
from mpidp.train.checksum import flat, flat_like
from mpidp.train.sharded.layout import Run
from mpidp.train.sharded.state import Part, State


class Shard:
    """The runs that this rank holds, as parameters of an optimizer of their own.

    Attributes:
        inner: the optimizer; its parameters are views of the model's.
        runs: the runs that it holds.
        flats: the memory of each parameter of the model, in one dimension.

    Args:
        optimizer: over the model's parameters; it gets the runs in their place.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.inner = optimizer
        self.runs: list[Run] = []
        self._parameters: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
        # Which parameters, by number, belong to each group.
        self._ranges: list[range] = []
        for group in optimizer.param_groups:
            group.pop("param_names", None)  # of whole parameters
            first = self._ranges[-1].stop if self._ranges else 0
            self._ranges.append(range(first, first + len(group["params"])))
        self._slices: list[Tensor] = []
        self.flats = [flat(parameter.detach()) for parameter in self._parameters]
        self._strides = [parameter.stride() for parameter in self._parameters]

    def hold(self, runs: Sequence[Run], states: Sequence[State], *, cast: bool = True) -> None:
        """Sets the runs, with the optimizer's state of each ({} where there is none yet).

        Args:
            runs: in any order.
            states: as many.
            cast: convert tensors of the state to the dtype of the parameter, as torch does when it loads a state.
        """
        self.runs = sorted(runs)
        self._slices = [self._slice(run) for run in self.runs]
        for numbers, group in zip(self._ranges, self.inner.param_groups, strict=True):
            held = zip(self.runs, self._slices, strict=True)
            group["params"] = [part for run, part in held if run.parameter in numbers]
        self.inner.state.clear()
        of_run = dict(zip(runs, states, strict=True))
        packed = self.inner.state_dict()
        packed["state"] = {place: of_run[run] for place, run in enumerate(self.runs) if of_run[run]}
        self.inner.load_state_dict(packed)  # moves each tensor to the device where torch keeps it
        if not cast:
            for run, part in zip(self.runs, self._slices, strict=True):
                _keep_dtypes(self.inner.state.get(part, {}), of_run[run])

    def _slice(self, run: Run) -> Tensor:
        part = self.flats[run.parameter][run.start : run.stop]
        return part.requires_grad_() if part.is_floating_point() or part.is_complex() else part

    def parts(self) -> list[Part]:
        """Each run with its state; not copies."""
        return [(run, dict(self.inner.state.get(part, {}))) for run, part in zip(self.runs, self._slices, strict=True)]

    def follow(self) -> bool:
        """Moves the runs to the new memory of parameters, as after `module.to(...)`; returns whether there was any.

        Raises:
            MpidpError: the order of elements in memory has changed, or it is not dense.
        """
        if all(lay.data_ptr() == p.data_ptr() for lay, p in zip(self.flats, self._parameters, strict=True)):
            return False
        for number, (strides, parameter) in enumerate(zip(self._strides, self._parameters, strict=True)):
            if parameter.stride() != strides:
                raise MpidpError(
                    f"parameter {number} of shape {tuple(parameter.shape)} had strides {strides} when its optimizer "
                    f"was sharded, and has {parameter.stride()} now: change memory formats before"
                )
        self.flats = [flat(parameter.detach()) for parameter in self._parameters]
        for run, part in zip(self.runs, self._slices, strict=True):
            part.data = self.flats[run.parameter][run.start : run.stop]
        return True

    def step(self) -> None:
        """Steps the runs by the model's gradients; those without a gradient stay."""
        for run, part in zip(self.runs, self._slices, strict=True):
            parameter = self._parameters[run.parameter]
            if parameter.grad is None:
                continue
            if parameter.grad.layout is not torch.strided:
                raise MpidpError(f"parameter {run.parameter} has a sparse gradient: its optimizer cannot be sharded")
            part.grad = flat_like(parameter.grad.detach(), parameter)[run.start : run.stop]
        self.inner.step()
        for part in self._slices:
            part.grad = None


def _keep_dtypes(loaded: State, given: State) -> None:
    """Some optimizers keep float32 state for 16-bit parameters; torch rounds it when it loads it."""
    for name, value in given.items():
        if isinstance(value, Tensor) and loaded[name].dtype != value.dtype:
            loaded[name] = value.to(loaded[name].device)


def is_dense(parameter: Tensor) -> bool:
    """Whether its elements fill a contiguous range of memory, in any order."""
    if parameter.layout is not torch.strided:
        return False
    lay = flat(parameter.detach())
    return lay.data_ptr() == parameter.data_ptr() and lay.is_contiguous()


# The optimizers of torch.optim that update each element independently of the others.
ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")


def check_divisible(optimizer: torch.optim.Optimizer) -> None:
    """Checks that an optimizer updates each element by itself, and that its parameters can be cut into shards.

    Raises:
        MpidpError: why it cannot be sharded, and what to do.
    """
    kind = type(optimizer)
    is_known = kind.__module__.startswith("torch.optim.") and kind.__name__ in ELEMENTWISE
    if not is_known and not getattr(kind, "elementwise", False):
        raise MpidpError(
            f"{kind.__qualname__} cannot be sharded: its step may mix the elements of a parameter. Use one of "
            f"{', '.join(ELEMENTWISE)}; a class of your own promises the contrary by an attribute elementwise = True"
        )
    if getattr(optimizer.step, "_wrapped_by_lr_sched", False):
        raise MpidpError("a scheduler holds the optimizer to be sharded: make it afterwards, over the sharded one")
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        if not is_dense(parameter):
            raise MpidpError(
                f"parameter {number} of shape {tuple(parameter.shape)} does not lie densely in memory (strides "
                f"{tuple(parameter.stride()) if parameter.layout is torch.strided else parameter.layout}), and cannot "
                f"be sharded: make it contiguous"
            )
