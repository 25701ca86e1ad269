"""A configuration enters; all that is wrong with its values leaves, in one error. What needs files is checked later."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mpidp.config import RunConfig
from mpidp.errors import ConfigError
from mpidp.printable import has_control, listed, shown

Check = tuple[Callable[[Any], bool], str]


def validate(config: RunConfig) -> None:
    """Check every value that needs no other file; raises one `ConfigError` that lists all faults."""
    table = dataclasses.asdict(config)
    faults = []
    for key, (is_allowed, allowed) in _CHECKS.items():
        section, name = key.split(".")
        value = table[section][name]
        if not is_allowed(value):
            faults.append(f"{key} = {shown(value)}; expected {allowed}.")
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
    if config.optimizer.sharded and config.reduce.reducer == "null":
        faults.append("optimizer.sharded is true, but reduce.reducer is null: gradients must be equal on all ranks.")
    if config.reduce.error_feedback and config.reduce.wire == "full":
        faults.append("reduce.error_feedback is true, but reduce.wire is full, which loses nothing; set bf16 or fp16.")
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


def _at_least(least: int) -> Check:
    return (lambda value: least <= value), f"an integer of at least {least}"


def _names_are_distinct(names: tuple[str, ...]) -> bool:
    return 0 < len(names) == len(set(names)) and "" not in names


# A run's name becomes a folder, a log file, a line of a batch script and a word of commands that people copy.
_RUN_NAME = re.compile(r"\w([\w .,+=@-]*[\w.,+=@-])?")
_MOST_NAME_BYTES = 200  # file names may have 255, and numbers are put behind it
_NAME = re.compile(r"[^\W\d]\w*(\.\w+)*(:[^\W\d]\w*(\.\w+)*)?")
_POSITIVE: Check = (lambda value: value > 0 and math.isfinite(value)), "a positive number"
_NOT_NEGATIVE: Check = (lambda value: value >= 0 and math.isfinite(value)), "a number of at least 0"
_REQUIRED: Check = (lambda name: bool(_NAME.fullmatch(name))), "a built-in name or module:function"
_OPTIONAL: Check = (lambda name: not name or bool(_NAME.fullmatch(name))), f"{_REQUIRED[1]}, or empty"

_CHECKS: dict[str, Check] = {
    "run.name": (
        (lambda name: bool(_RUN_NAME.fullmatch(name)) and len(name.encode()) <= _MOST_NAME_BYTES),
        "letters, digits, inner spaces and any of _ . , + = @ -, beginning with a letter, a digit or _, "
        f"of at most {_MOST_NAME_BYTES} bytes",
    ),
    "run.folder": (bool, "a folder"),
    "run.seed": _at_least(0),
    "data.train": ((lambda files: bool(files) and "" not in files), "at least one HDF5 file"),
    "data.validation": ((lambda files: "" not in files), "HDF5 files, or none"),
    "data.validation_fraction": ((lambda fraction: 0 <= fraction < 1), "a number in [0, 1)"),
    "data.fields": (_names_are_distinct, "at least one dataset, each once"),
    "data.global_batch": _at_least(1),
    "data.lanes": _at_least(0),
    "data.mixing_chunks": _at_least(0),
    "data.memory_bytes": _at_least(0),
    "data.threads": _at_least(0),
    "data.transform": _OPTIONAL,
    "data.sample_transform": _OPTIONAL,
    "model.name": _REQUIRED,
    "loss.name": _REQUIRED,
    "optimizer.name": _REQUIRED,
    "optimizer.lr": _POSITIVE,
    "scheduler.name": _OPTIONAL,
    "train.epochs": _at_least(1),
    "train.clip_norm": ((lambda norm: norm >= 0 and math.isfinite(norm)), "a number of at least 0"),
    "train.micro_batch": _at_least(0),
    "train.threads": _at_least(0),
    "train.on_end": _OPTIONAL,
    "train.min_ranks": _at_least(1),
    "reduce.bucket_bytes": _at_least(1),
    "reduce.piece_bytes": _at_least(0),
    "checkpoint.every_epochs": _at_least(0),
    "checkpoint.every_steps": _at_least(0),
    "checkpoint.keep": _at_least(1),
    "log.every_steps": _at_least(0),
    "log.progress_s": _POSITIVE,
    "log.trace_steps": _at_least(0),
    "log.trace_from": _at_least(0),
    "watch.stall_warning_s": _NOT_NEGATIVE,
    "watch.stall_abort_s": _NOT_NEGATIVE,
    "watch.compare_steps": _at_least(0),
}
