"""Learning rates as a function of the step: warm-up and cosine."""

import math

import torch
from torch.optim.lr_scheduler import LambdaLR

from mpidp.errors import ConfigError
from mpidp.printable import shown

SCHEDULES = {"warmup_cosine": "mpidp.train.schedule:warmup_cosine"}


def warmup_cosine(
    optimizer: torch.optim.Optimizer, total_steps: int, warmup_steps: int = 0, min_lr: float = 0.0
) -> LambdaLR:
    """Raises the learning rate linearly over the first steps, then lowers it along half a cosine.

    Step n, counted from 1, has n / warmup_steps of the optimizer's learning rate up to step warmup_steps. Steps after
    total_steps have min_lr. A checkpoint holds the number of steps only, so a resumed run may change the rest.

    Args:
        optimizer: its learning rates are the highest ones.
        total_steps: steps of the whole training.
        warmup_steps: steps with rising learning rates.
        min_lr: the learning rate at the end.

    Raises:
        ConfigError: numbers that make no schedule.
    """
    highest = float(optimizer.param_groups[0]["lr"])
    for name, value in (("warmup_steps", warmup_steps), ("total_steps", total_steps)):
        if type(value) is not int:
            raise ConfigError(f"scheduler.arguments.{name} = {shown(value)}; expected an integer.")
    if not 0 <= warmup_steps < total_steps:
        raise ConfigError(
            f"scheduler.arguments.warmup_steps = {warmup_steps}; expected at least 0 and less than the steps of the "
            f"whole training, which are {total_steps}."
        )
    if type(min_lr) not in (int, float) or not 0 <= min_lr <= highest:
        raise ConfigError(
            f"scheduler.arguments.min_lr = {shown(min_lr)}; expected a number from 0 to optimizer.lr = {highest:g}."
        )

    def factor(steps_done: int) -> float:
        if steps_done < warmup_steps:
            return (steps_done + 1) / warmup_steps
        share = min(1.0, (steps_done - warmup_steps) / (total_steps - warmup_steps))
        lowest = min_lr / float(optimizer.param_groups[0].get("initial_lr", highest))  # a resumed run keeps its own
        return lowest + (1 - lowest) * (1 + math.cos(math.pi * share)) / 2

    return LambdaLR(optimizer, factor)
