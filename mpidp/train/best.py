"""The best value of a metric so far: which checkpoint stays, and when training stops early."""

import math
from collections.abc import Mapping
from typing import Any

from mpidp.errors import ConfigError
from mpidp.printable import listed


class Best:
    """The best value of a metric of the evaluations, and for how long there was no better one. Not collective.

    A loss is better if it is lower, an accuracy if it is higher. NaN is never better.

    Attributes:
        metric: "validation_loss" or "validation_accuracy".
        value: the best; None before the first.
        epoch: where it was found, counted from 0.
        step: optimizer steps done by then; -1 before the first.
        epochs_since: evaluations since then.

    Args:
        metric: its name.
        min_delta: by how much a value must be better than the best to count.
    """

    def __init__(self, metric: str, min_delta: float = 0.0):
        self.metric, self.min_delta = metric, min_delta
        self.value: float | None = None
        self.epoch = self.step = -1
        self.epochs_since = 0
        self._last_step = -1
        self._before: dict[str, Any] | None = None  # the state before the best one

    def add(self, validation: Mapping[str, float], epoch: int, step: int) -> None:
        """Adds an evaluation; one of the same step once more, as after a loss of ranks, changes nothing.

        Args:
            validation: its results, the same on all ranks.
            epoch: that has ended.
            step: optimizer steps done.

        Raises:
            ConfigError: it has no such metric.
        """
        if step == self._last_step:
            return
        name = self.metric.removeprefix("validation_")
        if name not in validation:
            found = listed(sorted(set(validation) - {"samples"}))
            raise ConfigError(
                f"the run asks for the best {self.metric}, and the evaluation has {found} only; an accuracy needs "
                f"classes. Choose another in checkpoint.best, or train.early_stopping.metric."
            )
        before, self._last_step = self.state_dict(), step
        if self._is_better(validation[name]):
            self._before = before
            self.value, self.epoch, self.step, self.epochs_since = validation[name], epoch, step, 0
        else:
            self.epochs_since += 1

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.value is None:
            return True
        gain = value - self.value if self.metric.endswith("accuracy") else self.value - value
        return gain > self.min_delta

    def forget(self) -> None:
        """Goes back to the best one before, as the checkpoint of this one could not be written."""
        self.load_state_dict(self._before or Best(self.metric).state_dict())
        self._before = None

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        names = ("metric", "value", "epoch", "step", "epochs_since")
        return {**{name: getattr(self, name) for name in names}, "last_step": self._last_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned; of another metric it is not taken."""
        if state["metric"] == self.metric:
            self.value, self.epoch, self.step = state["value"], state["epoch"], state["step"]
            self.epochs_since, self._last_step = state["epochs_since"], state["last_step"]
