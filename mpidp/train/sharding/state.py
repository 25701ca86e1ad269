"""An optimizer's state of whole parameters in, that of runs of their elements out; and back.

A state is what `torch.optim` keeps for a parameter, by name: tensors of the parameter's shape, of which a run has its
part, in one dimension; and numbers that are the same for all its elements, such as the count of steps.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpidp.errors import MpidpError
from mpidp.train.bits import flat
from mpidp.train.sharding.layout import Run, overlap

State = dict[str, Any]
Part = tuple[Run, State]

# What torch.optim keeps one of for a whole parameter. (All is without dimensions where the parameter is.)
_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})


def cut(state: State, parameter: Tensor, run: Run) -> State:
    """The state of a run, out of that of its whole parameter; copies.

    Raises:
        MpidpError: the state holds a tensor that is neither a number nor of the parameter's shape.
    """
    return {name: _cut(name, value, parameter, run) for name, value in state.items()}


def join(run: Run, parts: Iterable[Part]) -> State:
    """The state of a run, out of those of runs that together hold all its elements; {} where these are empty."""
    joined: State = {}
    for other, state in parts:
        common = overlap(run, other)
        if common is None:
            continue
        target = slice(common.start - run.start, common.stop - run.start)
        source = slice(common.start - other.start, common.stop - other.start)
        for name, value in state.items():
            if not _is_cut(value):
                joined[name] = value.clone() if isinstance(value, Tensor) else value
                continue
            whole = joined.setdefault(name, torch.empty(run.numel, dtype=value.dtype, device=value.device))
            whole[target].copy_(value[source])
    return joined


def whole(parameter: Tensor, number: int, parts: Iterable[Part]) -> State:
    """The state of a whole parameter, as plain torch has it, in host memory.

    Args:
        parameter: gives shape and strides.
        number: of the parameter.
        parts: hold all its elements.
    """
    joined = join(Run(number, 0, parameter.numel()), parts)
    return {name: _shaped(value, parameter) if _is_cut(value) else value for name, value in joined.items()}


def select(run: Run, part: Part) -> Part | None:
    """What a part holds of a run; views."""
    common = overlap(run, part[0])
    if common is None:
        return None
    inside = slice(common.start - part[0].start, common.stop - part[0].start)
    return common, {name: value[inside] if _is_cut(value) else value for name, value in part[1].items()}


def to_host(state: State) -> State:
    """The same in host memory, tensors without memory beside their own."""
    return {name: value.detach().cpu().clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def full_state_dict(groups: Sequence[dict[str, Any]], parameters: Sequence[Tensor], parts: Sequence[Part]) -> State:
    """The plain `state_dict` of an optimizer.

    Args:
        groups: its packed param_groups.
        parameters: give shapes and strides, in the order of their numbers.
        parts: of all parameters that have a state.
    """
    of_parameter: dict[int, list[Part]] = {}
    for part in parts:
        of_parameter.setdefault(part[0].parameter, []).append(part)
    states = {number: whole(parameters[number], number, found) for number, found in sorted(of_parameter.items())}
    return {"state": {number: state for number, state in states.items() if state}, "param_groups": list(groups)}


def _cut(name: str, value: Any, parameter: Tensor, run: Run) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.shape == parameter.shape and not (value.dim() == 0 and name in _NUMBERS):
        return flat(_like(value, parameter))[run.start : run.stop].clone()
    if value.dim() == 0:
        return value.clone()
    raise MpidpError(
        f"the optimizer's state {name!r} has shape {tuple(value.shape)} for a parameter of shape "
        f"{tuple(parameter.shape)}, and cannot be cut into shards. Use the optimizer without sharding."
    )


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    """With the parameter's strides, so that elements lie in the same order."""
    if value.stride() == parameter.stride() or (value.is_contiguous() and parameter.is_contiguous()):
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _shaped(value: Tensor, parameter: Tensor) -> Tensor:
    shaped = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
    flat(shaped).copy_(value)
    return shaped


def _is_cut(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1
