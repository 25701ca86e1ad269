"""Sections of the run file in; model, optimizer and scheduler out."""

import inspect
from typing import Any, cast

import torch
from torch import nn

from mpidp.config import ModelSection, OptimizerSection, RunConfig, SchedulerSection
from mpidp.errors import ConfigError
from mpidp.models import BUILT_IN as MODELS
from mpidp.train.components.lookup import call, find


def build_model(config: RunConfig) -> nn.Module:
    """The model on the CPU, its initial weights drawn from `run.seed`, in `train.dtype`.

    Raises:
        ConfigError: it cannot be imported, does not take its arguments, or is no torch.nn.Module.
    """
    section: ModelSection = config.model
    function = find("model.name", section.name, MODELS)
    torch.manual_seed(config.run.seed)
    model = call(f"model {section.name!r}", function, **section.arguments)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model.name = {section.name!r} returned a {type(model).__name__}, not a torch.nn.Module")
    return model.to(getattr(torch, config.train.dtype))


def build_optimizer(section: OptimizerSection, model: nn.Module) -> torch.optim.Optimizer:
    """A class of torch.optim by name, or the user's own, over the model's trainable parameters.

    Raises:
        ConfigError: it cannot be found, refuses its arguments, or needs what the training loop does not give.
    """
    built_in = _classes(torch.optim, torch.optim.Optimizer)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    function = find("optimizer.name", section.name, built_in)
    optimizer = call(f"optimizer {section.name!r}", function, parameters, lr=section.lr, **section.arguments)
    _check_steps(section.name, optimizer)
    return cast(torch.optim.Optimizer, optimizer)


def _check_steps(name: str, optimizer: Any) -> None:
    """Raises ConfigError for an optimizer that the loop of `mpidp train` cannot step."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"optimizer.name = {name!r}: its step calls a closure, which computes the loss again as often as it likes, "
            f"and mpidp train computes it once a step. Choose another, or write a loop of your own, in which the "
            f"closure returns the mean loss over all ranks (docs/decisions/0020-what-a-run-file-cannot-train.md)."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError(
            f"optimizer.name = {name!r} steps sparse gradients only, and those are not reduced. Use Adam, and "
            f"sparse=False in the model."
        )


def build_scheduler(
    section: SchedulerSection, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """A class of torch.optim.lr_scheduler by name, or the user's own, stepped once an optimizer step."""
    if not section.name:
        return None
    built_in = _classes(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
    function = find("scheduler.name", section.name, built_in)
    return cast(
        torch.optim.lr_scheduler.LRScheduler,
        call(f"scheduler {section.name!r}", function, optimizer, **section.arguments),
    )


def _classes(module: Any, base: type) -> dict[str, str]:
    """Name -> place of every public class of a module that derives from `base`."""
    return {
        name: f"{module.__name__}:{name}"
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, base) and value is not base and not name.startswith("_")
    }
