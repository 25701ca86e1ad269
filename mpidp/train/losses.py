"""Losses by the names that run files give them, and what they accept."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own habit)
from torch import Tensor

from mpidp.errors import ConfigError, DataError
from mpidp.printable import listed, shown

Loss = Callable[[Tensor, Tensor], Tensor]

LOSSES = {
    "cross_entropy": "mpidp.train.losses:cross_entropy",
    "mse_loss": "torch.nn.functional:mse_loss",
    "l1_loss": "torch.nn.functional:l1_loss",
    "smooth_l1_loss": "torch.nn.functional:smooth_l1_loss",
    "huber_loss": "torch.nn.functional:huber_loss",
    "nll_loss": "torch.nn.functional:nll_loss",
    "binary_cross_entropy_with_logits": "torch.nn.functional:binary_cross_entropy_with_logits",
}


# The losses of torch that compare output and target element by element, and broadcast different shapes.
ELEMENTWISE = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy_with_logits,
    F.binary_cross_entropy,
    F.poisson_nll_loss,
    F.soft_margin_loss,
    F.kl_div,
)


# Torch ignores -100 unless it is told another class, and divides by the number of the others on each rank.
_NO_CLASS = torch.iinfo(torch.int64).min


def make_loss(
    name: str, function: Callable[..., Tensor], arguments: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> Loss:
    """A loss that returns the mean over the samples it is given; with weights of classes a `ClassLoss`.

    Losses of torch that compare element by element refuse an output and a target of different shapes.

    Args:
        name: in the run file, for messages.
        function: what it stands for.
        arguments: of the function, from the run file; for losses of torch lists become tensors.
        dtype: of these tensors.
        device: of these tensors.

    Raises:
        ConfigError: the function does not take these arguments.
    """
    is_torchs = function is cross_entropy or getattr(function, "__module__", "") == F.__name__
    _check_arguments(name, F.cross_entropy if function is cross_entropy else function, arguments, is_torchs)
    given = {key: _tensor(key, value, dtype, device) if is_torchs else value for key, value in arguments.items()}
    if function in (cross_entropy, F.cross_entropy, F.nll_loss):
        if "weight" in given or "ignore_index" in given:
            return ClassLoss(function, **given)
        given["ignore_index"] = _NO_CLASS
    if function in ELEMENTWISE:
        function = partial(elementwise, function)
    return partial(function, **given)


def _check_arguments(name: str, function: Callable[..., Tensor], arguments: Mapping[str, Any], is_torchs: bool) -> None:
    if is_torchs and (reducing := {"reduction", "reduce", "size_average"} & arguments.keys()):
        raise ConfigError(f"loss.arguments.{min(reducing)} is set; the loss has to be the mean over the samples.")
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C
        return
    try:
        signature.bind(None, None, **arguments)
    except TypeError as error:
        given = listed(f"{key}={shown(value)}" for key, value in arguments.items()) or "none"
        raise ConfigError(f"loss {name!r}: {error}. Arguments given: {given}.") from error


def _tensor(key: str, value: Any, dtype: torch.dtype, device: torch.device) -> Any:
    if not isinstance(value, list):
        return value
    try:
        return torch.tensor(value, dtype=dtype, device=device)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"loss.arguments.{key} = {shown(value)}; expected a list of numbers.") from error


class ClassLoss:
    """A loss of classes with weights, or of which one is ignored; the sum over samples divided by their number.

    Torch divides the sum by the weights of the targets instead. Those are not the same on all ranks, so that is done
    once their sum over all ranks is known.

    Attributes:
        ignored: the class whose targets count nothing, if any.

    Args:
        function: `cross_entropy` or `nll_loss`.
        weight: of each class; None for 1.
        ignore_index: the class to be ignored; None for none.
        arguments: further ones of the function.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        **arguments: Any,
    ):
        self._weight, self.ignored = weight, ignore_index
        number = _NO_CLASS if ignore_index is None else ignore_index
        self._sum = partial(function, weight=weight, ignore_index=number, reduction="sum", **arguments)

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """The sum over the samples divided by their number."""
        return self._sum(output, target) / max(1, len(target))

    def weight_of(self, target: Tensor) -> Tensor:
        """What torch divides the sum by, float64: the sum of the weights of the targets' classes.

        For class probabilities (N, C, ...) it is the number of places. Targets that are no class have any weight, as
        the loss raises.
        """
        if target.is_floating_point():
            places = target.numel() // max(1, target.shape[1]) if target.dim() > 1 else len(target)
            return target.new_tensor(places, dtype=torch.float64)
        classes = target.long()
        counts = torch.ones_like(classes, dtype=torch.float64)
        if self.ignored is not None:
            counts *= classes != self.ignored
        if self._weight is not None:
            counts *= self._weight.double()[classes.clamp(0, len(self._weight) - 1)]
        return counts.sum()


def cross_entropy(output: Tensor, target: Tensor, **arguments: float) -> Tensor:
    """Cross entropy of class scores.

    Args:
        output: scores (N, C), of a sequence (N, T, C), or, as torch has it, (N, C, ...).
        target: the classes, integers of any dtype: (N,), (N, T) or (N, ...); or floating-point probabilities (N, C).
        arguments: torch's own.

    Raises:
        DataError: a target of another dtype or shape, which says what to write in a run file.
    """
    if target.is_floating_point():
        _check_probabilities(output, target)
        return F.cross_entropy(output, target, **arguments)  # type: ignore[arg-type]
    if _classes_last(output, target):
        output, target = output.flatten(0, -2), target.flatten()
    elif isinstance(output, Tensor) and output.dim() == target.dim() > 1:
        raise DataError(_too_many_dimensions(output, target))
    return F.cross_entropy(output, target.long(), **arguments)  # type: ignore[arg-type]


def _check_probabilities(output: Tensor, target: Tensor) -> None:
    """Raises DataError for floating-point targets, unless they are probabilities of shape (N, C)."""
    if not isinstance(output, Tensor) or (target.dim() == 2 and output.shape == target.shape):
        return
    text = (
        f"cross_entropy takes classes as integers, or floating-point probabilities of the shape of the output (N, C), "
        f"not floating-point targets {tuple(target.shape)} for an output {tuple(output.shape)}"
    )
    if output.shape == target.shape and target.dim() > 2:
        raise DataError(f'{text}. loss.name = "torch.nn.functional:cross_entropy" takes them as (N, C, ...).')
    raise DataError(
        f'{text}. For classes stored as floating-point numbers write [data.field.NAME] decode = "numpy:int64", which '
        f'cuts off fractions; for numbers to be predicted loss.name = "mse_loss".'
    )


def _too_many_dimensions(output: Tensor, target: Tensor) -> str:
    text = (
        f"cross_entropy takes one integer for each class to be found, and targets {tuple(target.shape)} have as many "
        f"dimensions as the output {tuple(output.shape)}"
    )
    if target.shape == output.shape:
        return f'{text}. For one-hot or other probabilities write [data.field.NAME] dtype = "float32".'
    if target.dim() == 2 and target.shape[1] == 1:
        return f'{text}. To make them ({len(target)},) write [data.field.NAME] decode = "numpy:ravel".'
    return f"{text}. Change the shape in data.transform."


def elementwise(loss: Callable[..., Tensor], output: Tensor, target: Tensor, **arguments: float) -> Tensor:
    """A loss of torch, without its broadcasting: (N,) against (N, 1) would compare every sample with every other."""
    if isinstance(output, Tensor) and output.shape != target.shape:
        raise DataError(
            f"{loss.__name__} takes an output and a target of the same shape, not {tuple(output.shape)} and "
            f"{tuple(target.shape)}. {_same_shape_advice(output, target)}"
        )
    if isinstance(output, Tensor) and not (target.is_floating_point() or target.is_complex()):
        target = target.to(output.dtype)
    return loss(output, target, **arguments)


def _same_shape_advice(output: Tensor, target: Tensor) -> str:
    if target.dim() == 2 and output.shape == target.shape[:1]:
        return f'To make the target ({len(target)},) write [data.field.NAME] decode = "numpy:ravel".'
    if target.dim() == 1 and output.shape == (len(target), 1):
        return "To make the target (N, 1) let a data.transform of yours return its unsqueeze(1)."
    return "Change the model, or the shape in data.transform."


def count_right(output: Tensor, target: Tensor, ignored: int | None = None) -> tuple[Tensor, Tensor | int] | None:
    """How many class scores have their largest at the target, and of how many; None if there are no classes.

    For sequences it is the mean over the sequence, summed over samples, and the number of samples; with an ignored
    class the number of the other places. Class probabilities as targets have none.
    """
    if target.is_floating_point() or not _classes_last(output, target):
        return None
    right = (output.argmax(-1) == target).double()
    if ignored is not None:
        counted = target != ignored
        return (right * counted).sum(), counted.sum()
    return right.flatten(1).mean(1).sum() if right.dim() > 1 else right.sum(), len(target)


def _classes_last(output: Tensor, target: Tensor) -> bool:
    return isinstance(output, torch.Tensor) and output.dim() == target.dim() + 1 and output.shape[:-1] == target.shape
