"""Checks of a whole run file that need no other file."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, get_type_hints

from mpidp.config import RunConfig
from mpidp.errors import ConfigError
from mpidp.printable import has_control, listed, shown


def validate(config: RunConfig) -> None:
    """Check every value that needs no other file; raises one `ConfigError` that lists all faults."""
    table = dataclasses.asdict(config)
    faults = []
    for section, values in table.items():
        for name, hint in get_type_hints(type(getattr(config, section)), include_extras=True).items():
            for check in getattr(hint, "__metadata__", ()):
                if not check.is_allowed(values[name]):
                    faults.append(f"{section}.{name} = {shown(values[name])}; expected {check.allowed}.")
    faults += [f"{key} = {shown(text)}; expected text without control characters." for key, text in _odd_texts(table)]
    for section, values in table.items():
        odd = [name for name in values.get("arguments", {}) if not name.isidentifier()]
        faults += [f"{section}.arguments has {name!r}; expected a keyword argument's name." for name in odd]
    if "lr" in config.optimizer.arguments:
        faults.append("optimizer.arguments.lr is set; the learning rate belongs in optimizer.lr.")
    strangers = [name for name in config.data.field if name not in config.data.fields]
    faults += [
        f"data.field.{name}: there is no such field in data.fields, which has {listed(config.data.fields)}."
        for name in strangers
    ]
    if config.data.validation and config.data.validation_fraction:
        faults.append("data.validation and data.validation_fraction are both set; set one of them.")
    stopping, is_evaluated = config.train.early_stopping, config.data.validation or config.data.validation_fraction
    for key, metric in (("checkpoint.best", config.checkpoint.best), ("train.early_stopping.metric", stopping.metric)):
        if metric and not is_evaluated:
            faults.append(f"{key} = {metric!r} needs data.validation or data.validation_fraction; set one of them.")
    is_fp16 = config.train.precision == "fp16"
    for key, needs_all in (
        ("optimizer.sharded is true", config.optimizer.sharded),
        ('train.precision is "fp16"', is_fp16),
    ):
        if needs_all and config.reduce.reducer == "null":
            faults.append(f"{key}, but reduce.reducer is null: gradients must be equal on all ranks.")
    if config.reduce.error_feedback and config.reduce.comm_dtype == "full":
        faults.append(
            "reduce.error_feedback is true, but reduce.comm_dtype is full, which loses nothing; set bf16 or fp16."
        )
    if config.reduce.error_feedback and is_fp16:
        faults.append(
            'reduce.error_feedback is true, but train.precision is "fp16": gradients of each step have another scale, '
            "so rounding errors of one step do not fit the next; set bf16 or float32."
        )
    if config.train.ema_decay and config.optimizer.sharded and config.train.fault_tolerance == "shrink":
        faults.append(
            'train.ema_decay and optimizer.sharded are set with train.fault_tolerance = "shrink": when a rank dies in '
            "a step, its shard of the weights is not there to be averaged; leave one of them out."
        )
    if config.train.sync_batch_norm and config.train.micro_batch:
        faults.append(
            "train.sync_batch_norm is true, but train.micro_batch is set: batch norm would be over micro batches, of "
            "which ranks may have different numbers; set one of them."
        )
    if faults:
        raise ConfigError(listed(faults, "\n  "))


def _odd_texts(table: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield key and text of settings with a line break or the like; keyword arguments may hold any text."""
    for section, values in table.items():
        for name, value in values.items():
            texts = [value] if isinstance(value, str) else value if isinstance(value, tuple) else ()
            yield from ((f"{section}.{name}", text) for text in texts if has_control(text))
