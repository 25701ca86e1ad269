"""A plain optimizer and runs of its parameters' elements in; the same optimizer, stepping these alone, out. No MPI."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mpidp.train.bits import flat
from mpidp.train.sharding.layout import Run
from mpidp.train.sharding.state import Part, State


class Shard:
    """The runs that this rank holds, as parameters of an optimizer of their own.

    Attributes:
        inner: the optimizer; its parameters are views of the model's.
        runs: what it holds.
        flats: the memory of each parameter of the model, in one dimension.

    Args:
        optimizer: over the model's parameters, which it gives up.
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

    def hold(self, runs: Sequence[Run], states: Sequence[State]) -> None:
        """Takes runs, ordered by parameter, with the optimizer's state of each ({} where it has none yet)."""
        self.runs = sorted(runs)
        self._slices = [self.flats[run.parameter][run.start : run.stop].requires_grad_() for run in self.runs]
        for numbers, group in zip(self._ranges, self.inner.param_groups, strict=True):
            held = zip(self.runs, self._slices, strict=True)
            group["params"] = [part for run, part in held if run.parameter in numbers]
        self.inner.state.clear()
        of_run = dict(zip(runs, states, strict=True))
        packed = self.inner.state_dict()
        packed["state"] = {place: of_run[run] for place, run in enumerate(self.runs) if of_run[run]}
        self.inner.load_state_dict(packed)  # brings each tensor to the device and dtype that torch wants it in

    def parts(self) -> list[Part]:
        """Each run with its state; not copies."""
        return [(run, dict(self.inner.state.get(part, {}))) for run, part in zip(self.runs, self._slices, strict=True)]

    def follow(self) -> bool:
        """Whether somebody gave a parameter new memory (`module.to(...)`); the runs are in it then."""
        if all(lay.data_ptr() == p.data_ptr() for lay, p in zip(self.flats, self._parameters, strict=True)):
            return False
        self.flats = [flat(parameter.detach()) for parameter in self._parameters]
        for run, part in zip(self.runs, self._slices, strict=True):
            part.data = self.flats[run.parameter][run.start : run.stop]
        return True

    def step(self) -> None:
        """Brings the runs up to date, by the model's gradients; where there is none, not."""
        for run, part in zip(self.runs, self._slices, strict=True):
            parameter = self._parameters[run.parameter]
            if parameter.grad is not None:
                part.grad = _flat_like(parameter.grad.detach(), parameter)[run.start : run.stop]
        self.inner.step()
        for part in self._slices:
            part.grad = None


def _flat_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """In one dimension, in the order in which the parameter lies in memory."""
    alike = gradient.stride() == parameter.stride() or (gradient.is_contiguous() and parameter.is_contiguous())
    return flat(gradient if alike else torch.empty_like(parameter).copy_(gradient))
