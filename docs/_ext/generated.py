"""Sphinx extension: tables of settings and of commands, made from their declarations in the package.

A page holds a line such as `<!-- generated: settings -->`, which is replaced before the page is read.
"""

import argparse
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from sphinx.application import Sphinx

from mpidp import config, options
from mpidp.cli import COMMANDS, Command

_MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
_TYPES = {int: "integer", float: "number", str: "text", bool: "`true` or `false`"}


def settings() -> str:
    """Return a section with a table of keys for each section of a run file."""
    parts = []
    for section in dataclasses.fields(config.RunConfig):
        kind: Any = get_type_hints(config.RunConfig)[section.name]
        parts += _tables(section.name, kind)
    field = _table_of_keys("data.field.NAME", config.FieldSection)
    parts.insert(2, f"## `[data.field.NAME]`\n\n{_paragraph(config.FieldSection)}\n\n{field}")
    return "\n\n".join(parts)


def _tables(name: str, kind: Any) -> list[str]:
    """Return the section of a table of the run file, and of the tables in it."""
    inner = [(each, hint) for each, hint in get_type_hints(kind).items() if dataclasses.is_dataclass(hint)]
    own = f"## `[{name}]`\n\n{_paragraph(kind)}\n\n{_table_of_keys(name, kind)}"
    return [own, *(part for each, hint in inner for part in _tables(f"{name}.{each}", hint))]


def _table_of_keys(section: str, kind: type) -> str:
    helps, hints = options._helps(kind), get_type_hints(kind, include_extras=True)
    rows = []
    for field in dataclasses.fields(kind):
        key = f"{section}.{field.name}"
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
        name, meaning = f"`{key}`{{#{re.sub('[._]', '-', key).lower()}}}", _with_code(helps[field.name])
        rows.append(f"| {name} | {_type(hints[field.name])} | {_value(default)} | {meaning} |")
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows])


def _type(hint: Any) -> str:
    """Return a type in words, with the values that are allowed."""
    allowed = ""
    while get_origin(hint) is Annotated:
        hint, *more = get_args(hint)
        allowed = next((check.allowed for check in more if isinstance(check, config.Check)), allowed)
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(f"`{_quoted(value)}`" for value in get_args(hint))
    if get_origin(hint) is tuple:
        return (allowed and f"list of text: {allowed}") or "list of text"
    if get_origin(hint) is dict or dataclasses.is_dataclass(hint):
        return "table"
    return allowed or _TYPES[hint]


def _quoted(value: str) -> str:
    return f'"{value}"'


def _value(value: Any) -> str:
    """Return a default as TOML has it."""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f"`{_quoted(value)}`"
    if isinstance(value, tuple):
        return "`[" + ", ".join(map(_quoted, value)) + "]`"
    return "see below" if dataclasses.is_dataclass(value) else "empty" if isinstance(value, dict) else f"`{value}`"


def _paragraph(kind: type) -> str:
    return _with_code(" ".join((kind.__doc__ or "").split()))


def commands() -> str:
    """Return a section for each command: usage, what it does, its options."""
    return "\n\n".join(_section(command) for command in COMMANDS)


def _section(command: Command) -> str:
    kind = _options_of(command)
    usage = textwrap.fill(f"mpidp {command.name} {command.takes}", 88, subsequent_indent="    ", break_on_hyphens=False)
    text = _with_code(inspect.cleandoc(kind.__doc__ or ""))
    has_sections = any(field.default_factory is not dataclasses.MISSING for field in dataclasses.fields(kind))
    parser = options._parser(kind, f"mpidp {command.name}", kind() if has_sections else None, options.HELP)
    rows = [_row(action) for action in _actions(parser)]
    table = "\n".join(["| option | meaning |", "|---|---|", *rows])
    return f"## `mpidp {command.name}`\n\n```text\n{usage}\n```\n\n{text}\n\n{table}"


def _options_of(command: Command) -> type:
    """Return the dataclass of a command's options; of one that reads its words itself, the one of its module."""
    module, _, name = (command.options or command.run).partition(":")
    home = importlib.import_module(module)
    if command.options:
        return getattr(home, name)
    (kind,) = (
        each
        for each in vars(home).values()
        if dataclasses.is_dataclass(each) and each.__module__ == module and each.__name__.endswith("Options")
    )
    return kind


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield options and positional words, without the settings of run files and their sections."""
    for action in parser._actions:
        if "." not in action.dest:
            yield action


def _row(action: argparse.Action) -> str:
    metavar = action.metavar or ""
    name = ", ".join(action.option_strings) or str(metavar)
    takes_value = action.option_strings and action.nargs != 0
    shown = f"{name}={metavar}" if takes_value else name
    return f"| `{shown}` | {_with_code((action.help or '').replace('%%', '%'))} |"


def _with_code(text: str) -> str:
    """Return a help text with its options in code style, as Markdown."""
    text = re.sub(r"[|_*<\[\]]", r"\\\g<0>", text)
    return re.sub(r"(?<![\w-])--[a-z][^\s,;:)]*[^\s,;:).]", lambda found: f"`{found[0].replace(chr(92), '')}`", text)


_MAKERS: dict[str, Callable[[], str]] = {"settings": settings, "commands": commands}


def fill_in(_app: Sphinx, _page: str, source: list[str]) -> None:
    """Replaces the marks of a page, and links to files of the project that the site has as pages of its own."""
    text = _MARK.sub(lambda mark: _MAKERS[mark.group(1)](), source[0])
    text = re.sub(r"\]\(../../benchmarks/(\w+\.md)", r"](/explanation/measurements/\1", text)
    source[0] = text.replace("](../../jobs/sites/README.md", "](/howto/sites.md")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects the handler."""
    app.connect("source-read", fill_in)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
