"""An entry of env.json or metrics.jsonl enters; it leaves without values that are not of the kind that a run records.

Run folders of others, and damaged ones, are read too. What is left out counts as not recorded. Pure.
"""

from collections.abc import Callable, Mapping
from typing import Any

_LARGEST = 2**63


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    """Whether arithmetic and axes can take it; null is what a run writes for a number that was not finite."""
    return value is None or (type(value) in (int, float) and -_LARGEST < value < _LARGEST)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_table_of_numbers(value: Any) -> bool:
    return _is_table(value) and all(item is not None and _is_number(item) for item in value.values())


_KINDS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("end", "time"), _is_text),
    **dict.fromkeys(("accuracy", "loss", "lost_s", "lr", "samples_per_s"), _is_number),
    **dict.fromkeys(("first_step", "last_step", "nodes", "ranks", "samples", "step"), _is_count),
    **dict.fromkeys(("memory_bytes", "seconds"), _is_table_of_numbers),
    "hosts": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "lost": lambda value: isinstance(value, list) and all(map(_is_table, value)),
    "packages": lambda value: _is_table(value) and all(map(_is_text, value.values())),
    "slurm_job_id": lambda value: value is None or _is_text(value),
}


def of_known_kinds(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The entry without values of another kind than its keys have; keys that are not known stay as they are."""
    return {key: value for key, value in entry.items() if key not in _KINDS or _KINDS[key](value)}
