"""Callbacks of a run: objects of the user's own, called at the start, after steps and epochs, and at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpidp.config import CallbackSection
from mpidp.errors import ConfigError
from mpidp.printable import listed
from mpidp.toml import nearest
from mpidp.train.components import call, find

if TYPE_CHECKING:
    from mpidp.train.trainer import Trainer
    from mpidp.world.world import World

METHODS = ("on_start", "on_step", "on_epoch", "on_end")


class Callbacks:
    """The callbacks of a run, called on every rank in the order of the run file. Every call is collective.

    An exception on one rank is raised on all, with a note that names the callback. Only methods that some callback has
    cost an exchange between the ranks.

    Args:
        sections: of the run file, by name.

    Raises:
        ConfigError: a class that cannot be found or made, or that has none of the methods, or an unknown one.
    """

    def __init__(self, sections: Mapping[str, CallbackSection]):
        self._all = {name: _make(name, section) for name, section in sections.items()}

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step of this start."""
        self._call(trainer.world, "on_start", trainer)

    def on_step(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
        """After a step; `metrics` are those of the newest record of training, over all ranks."""
        self._call(trainer.world, "on_step", trainer, step, metrics)

    def on_epoch(self, trainer: Trainer, epoch: int, metrics: Mapping[str, Any]) -> None:
        """After an epoch and its evaluation, whose results are among the metrics as `validation_...`."""
        self._call(trainer.world, "on_epoch", trainer, epoch, metrics)

    def on_end(self, trainer: Trainer) -> None:
        """After the last step of this start, also if it was asked to stop; not after an error."""
        self._call(trainer.world, "on_end", trainer)

    def _call(self, world: World, method: str, *args: Any) -> None:
        for name, callback in self._all.items():
            if hasattr(callback, method):
                with world.raise_on_all_ranks(f"in {method} of callback {name} ({type(callback).__qualname__})"):
                    getattr(callback, method)(*args)


def _make(name: str, section: CallbackSection) -> Any:
    key = f"train.callbacks.{name}.name"
    callback = call(f"callback {name!r}", find(key, section.name, {}), **section.arguments)
    names = [each for each in dir(callback) if each.startswith("on_") and callable(getattr(callback, each))]
    for each in names:
        if each not in METHODS:
            raise ConfigError(
                f"{key} = {section.name!r} has a method {each}, which is never called.{nearest(each, METHODS)} Called "
                f"are {listed(METHODS)}."
            )
    if not names:
        raise ConfigError(f"{key} = {section.name!r} has none of the methods {listed(METHODS)}; write at least one.")
    return callback
