"""How a CSV file is to be read enters; which of its columns are x and y leaves, and what its cells are."""

from dataclasses import dataclass
from typing import Literal

from mpidp.errors import ConfigError


@dataclass(frozen=True)
class CsvOptions:
    """How to read a CSV file."""

    label: str | None = None
    columns: tuple[str, ...] = ()
    dtype: Literal["float32", "float64"] = "float32"
    delimiter: str = ","
    has_header: bool = True
    empty_as_nan: bool = False


def choose(path: str, names: list[str], options: CsvOptions) -> tuple[list[int], int | None]:
    """Return the columns of x and of the label; raises `ConfigError` for names that are not there."""
    for name in (*options.columns, *([options.label] if options.label is not None else [])):
        if name not in names:
            raise ConfigError(f'{path}: no column "{name}"; its columns are {", ".join(names)}')
    label = names.index(options.label) if options.label is not None else None
    chosen = [names.index(name) for name in options.columns] or [n for n in range(len(names)) if n != label]
    if not chosen:
        raise ConfigError(f"{path}: no columns are left for x beside the label")
    return chosen, label


def is_number(text: str) -> bool:
    """Return whether a cell is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def is_integer(text: str) -> bool:
    """Return whether a cell is a whole number that int64 holds."""
    try:
        return -(2**63) <= int(text) < 2**63
    except ValueError:
        return False
