"""TOML files read into typed dataclasses, and plain values written as TOML text.

Knows nothing of mpidp's own settings: `mpidp.config` holds those. Reading is strict, because a misspelt key
that is ignored costs its owner a whole training run: unknown keys, wrong types and wrong values are errors.
"""

import difflib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from mpidp.errors import ConfigError
from mpidp.printable import listed, shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Schema = TypeVar("Schema", bound=DataclassInstance)
else:
    Schema = TypeVar("Schema")

_TYPE_NAMES = {str: "a string", bool: "true or false", int: "an integer", float: "a number"}
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return " Did you mean ...?" for the closest of `allowed`, or "" if nothing is close."""
    close = difflib.get_close_matches(name, list(allowed), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def read(path: Path) -> dict[str, Any]:
    """Read a TOML file into nested dicts; raises `ConfigError` naming the file and the line."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        folder = path.parent
        others = sorted(other.name for other in folder.glob("*.toml"))
        listing = f" {folder}/ holds: {listed(others)}." if others else f" {folder}/ holds no TOML file."
        raise ConfigError(f"run file {path}: no such file.{nearest(path.name, others)}{listing}") from error
    except OSError as error:
        raise ConfigError(f"run file {path}: cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"run file {path}: not UTF-8 text (byte {error.start}); is it TOML?") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"run file {path}: not valid TOML: {error}.") from error


def into(schema: type[Schema], table: Mapping[str, Any], source: str, section: str = "") -> Schema:
    """Turn nested dicts into the dataclass `schema`; absent keys keep their defaults.

    Field types may be str, bool, int, float, a Literal of strings, tuple[str, ...] (a string or a list of
    strings), dict[str, Any] (scalars and lists), another such dataclass, or a dict of these by name.
    Raises `ConfigError` for an unknown key, a wrong type or a value outside a Literal; it names the origin,
    `source`, and the place in it, `section`.
    """
    kinds = get_type_hints(schema)
    for key in table:
        if key not in kinds:
            raise ConfigError(f"{source}: {_unknown_key(key, section, kinds)}")
    values = {key: _convert(value, kinds[key], source, _dotted(section, key)) for key, value in table.items()}
    return schema(**values)


def parse_value(text: str) -> Any:
    """Read one value as TOML writes it (`3`, `true`, `[1, 2]`, `"text"`); anything else is a plain string."""
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = table["value"]
    return value if len(table) == 1 and isinstance(value, str | bool | int | float | list | dict) else text


def write(table: Mapping[str, Any]) -> str:
    """Write nested dicts of strings, numbers, booleans and lists as TOML text that reads back equal."""
    return "\n\n".join(_blocks(table, "")) + "\n"


def _blocks(table: Mapping[str, Any], name: str) -> list[str]:
    """Return a table's own `key = value` lines as one block, then the blocks of the tables inside it."""
    scalars = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    tables = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in scalars.items()]
    if name and (lines or not tables):
        lines.insert(0, f"[{name}]")
    blocks = ["\n".join(lines)] if lines else []
    for key, inner in tables.items():
        blocks += _blocks(inner, _dotted(name, _key(key)))
    return blocks


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    # JSON's escapes are all valid in TOML; TOML also forbids a bare DEL, which JSON leaves as it is.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _string(value)
        case float() if math.isnan(value):
            return "nan"
        case int() | float():
            return repr(value)
        case list() | tuple():
            return f"[{', '.join(_value(item) for item in value)}]"
    raise AssertionError(f"TOML has no value of type {type(value).__name__}: {value!r}")


def _dotted(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def _unknown_key(key: str, section: str, kinds: Mapping[str, Any]) -> str:
    where = f"in [{section}]" if section else "at the top level"
    owners = [name for name, kind in kinds.items() if is_dataclass(kind) and key in get_type_hints(kind)]
    hint = nearest(key, kinds) or (f" It belongs in [{owners[0]}]." if owners else "")
    return f"unknown key {key!r} {where}.{hint} Allowed here: {listed(kinds)}."


def _convert(value: Any, kind: Any, source: str, key: str) -> Any:
    """Check one value against its field's type and return it in that type."""
    if is_dataclass(kind) and isinstance(kind, type):
        if isinstance(value, Mapping):
            return into(kind, value, source, key)
        raise _wrong(value, f"a table: write [{key}] and its keys below it", source, key)
    origin = get_origin(kind)
    if origin is Literal:
        return _choice(value, get_args(kind), source, key)
    if origin is tuple:
        items = [value] if isinstance(value, str) else value
        if isinstance(items, list | tuple) and all(isinstance(item, str) for item in items):
            return tuple(items)
        raise _wrong(value, "a string or a list of strings", source, key)
    if origin is dict and is_dataclass(get_args(kind)[1]):
        return _tables(value, get_args(kind)[1], source, key)
    if origin is dict:
        return _arguments(value, source, key)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise _wrong(value, "an integer of 64 bits", source, key)
    if type(value) is kind:
        return value
    if kind is float and type(value) is int:
        return float(value)
    raise _wrong(value, _TYPE_NAMES[kind], source, key)


def _choice(value: Any, choices: tuple[Any, ...], source: str, key: str) -> Any:
    if value in choices:
        return value
    hint = nearest(value, choices) if isinstance(value, str) else ""
    listing = ", ".join(map(repr, choices))
    raise ConfigError(f"{_wrong(value, f'one of {listing}', source, key)}{hint}")


def _tables(value: Any, schema: Any, source: str, key: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(value, f"tables: write [{key}.NAME] and its keys below it", source, key)
    return {name: _convert(item, schema, source, f"{key}.{_key(name)}") for name, item in value.items()}


def _arguments(value: Any, source: str, key: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(value, f"a table: write [{key}] and its keys below it", source, key)
    for name, item in value.items():
        if not _is_plain(item):
            raise _wrong(item, "a string, number, true or false, or a list of these", source, f"{key}.{name}")
    return dict(value)


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return isinstance(value, str | bool | int | float)


def _wrong(value: object, expected: str, source: str, key: str) -> ConfigError:
    return ConfigError(f"{source}: {key} = {shown(value)} ({type(value).__name__}); expected {expected}.")
