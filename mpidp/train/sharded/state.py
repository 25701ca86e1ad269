"""The state of an optimizer, split by runs of its parameters' elements and joined again.

The state of a parameter in `torch.optim` is, by name: tensors of the parameter's shape, of which a run has its part in
one dimension; and numbers that are the same for all its elements, such as the count of steps.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpidp.errors import MpidpError
from mpidp.train.checksum import flat_like
from mpidp.train.sharded.layout import Run, by_parameter, overlap, place

State = dict[str, Any]
Part = tuple[Run, State]

# What torch.optim keeps one of for a whole parameter. (All is without dimensions where the parameter is.)
_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})


def cut(state: State, parameter: Tensor, run: Run) -> State:
    """The state of a run, copied from that of its whole parameter.

    Raises:
        MpidpError: the state holds a tensor that is neither a number nor of the parameter's shape.
    """
    return {name: _cut(name, value, parameter, run) for name, value in state.items()}


def join(run: Run, parts: Iterable[Part]) -> State:
    """The state of a run, from those of runs that together cover it; {} where these are empty.

    Raises:
        MpidpError: a part holds a tensor that is neither a number nor of its run's length.
    """
    joined: State = {}
    for other, state in parts:
        common = overlap(run, other)
        if common is None:
            continue
        for name, value in state.items():
            if not _is_cut(value):
                joined[name] = value.clone() if isinstance(value, Tensor) else value
                continue
            if value.numel() != other.numel:
                raise _uncuttable(name, value, f"{other.numel} elements")
            if name not in joined:
                joined[name] = torch.empty(run.numel, dtype=value.dtype, device=value.device)
            joined[name][place(common, run)].copy_(value[place(common, other)])
    return joined


def whole(parameter: Tensor, number: int, parts: Iterable[Part]) -> State:
    """The state of a whole parameter, as plain torch has it, in host memory.

    Args:
        parameter: gives shape and strides.
        number: of the parameter.
        parts: hold all its elements; a single one is taken as it is, not copied.
    """
    run = Run(number, 0, parameter.numel())
    parts = list(parts)
    joined = parts[0][1] if [part[0] for part in parts] == [run] else join(run, parts)
    return {name: _shaped(value, parameter) if _is_cut(value) else value for name, value in joined.items()}


def select(run: Run, part: Part) -> Part | None:
    """Views of the elements of a run in a part."""
    common = overlap(run, part[0])
    if common is None:
        return None
    inside = place(common, part[0])
    return common, {name: value[inside] if _is_cut(value) else value for name, value in part[1].items()}


def run_of(part: Part) -> Run:
    """The run whose state it is."""
    return part[0]


def to_host(state: State) -> State:
    """The same in host memory, each tensor with memory of its own."""
    return {name: value.detach().cpu().clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def full_state_dict(groups: Sequence[dict[str, Any]], parameters: Sequence[Tensor], parts: Sequence[Part]) -> State:
    """The plain `state_dict` of an optimizer.

    Args:
        groups: its packed param_groups.
        parameters: give shapes and strides, in the order of their numbers.
        parts: of all parameters that have a state.
    """
    found = by_parameter(parts, run_of)
    states = {number: whole(parameters[number], number, found.pop(number)) for number in sorted(found)}
    return {"state": {number: state for number, state in states.items() if state}, "param_groups": list(groups)}


def _cut(name: str, value: Any, parameter: Tensor, run: Run) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.shape == parameter.shape and not (value.dim() == 0 and name in _NUMBERS):
        return flat_like(value, parameter)[run.start : run.stop].clone()
    if value.dim() == 0:
        return value.clone()
    raise _uncuttable(name, value, f"a parameter of shape {tuple(parameter.shape)}")


def _uncuttable(name: str, value: Tensor, what: str) -> MpidpError:
    return MpidpError(
        f"the optimizer's state {name!r} has shape {tuple(value.shape)} for {what}, and cannot be cut into shards. "
        f"Use the optimizer without sharding."
    )


def _shaped(value: Tensor, parameter: Tensor) -> Tensor:
    return torch.as_strided(value, parameter.shape, parameter.stride())  # dense, and in the order of memory


def _is_cut(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1


# Keys that a plain optimizer's state does not have: over how many ranks it was sharded, and of each parameter shape and
# strides, as elements are cut in the order in which they lie in memory.
RANKS, SHAPES = "ranks", "shapes"

SavedPart = tuple[int, int, int, dict[str, Any]]  # parameter, start, stop, state
ReadRank = Callable[[int], list[SavedPart]]


def plain_state(saved: dict[str, Any], read: ReadRank) -> dict[str, Any]:
    """The `state_dict` that the plain optimizer would have.

    Args:
        saved: what all ranks share; returned as it is if it is of a plain optimizer.
        read: returns the own state of a rank.
    """
    if RANKS not in saved:
        return saved
    parts = [part for rank in range(saved[RANKS]) for part in to_parts(read(rank))]
    return full_state_dict(saved["param_groups"], like(saved), parts)


def like(saved: dict[str, Any]) -> list[Tensor]:
    """The parameters as tensors without memory."""
    return [torch.empty_strided(shape, strides, device="meta") for shape, strides in saved[SHAPES]]


def to_parts(saved: Iterable[SavedPart]) -> list[Part]:
    """A rank's own state, as runs with their state."""
    return [(Run(parameter, start, stop), state) for parameter, start, stop, state in saved]
