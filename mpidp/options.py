"""Command-line options declared as a dataclass, and parsed by the standard library's argparse.

Each field is an option, and the text under it is its help. What a type does not say stands beside it as an `Arg`:

    @dataclass(frozen=True)
    class CopyOptions:
        \"\"\"Copy a file.\"\"\"

        source: Annotated[Path, Arg("FILE", positional=True)]
        \"\"\"What to copy.\"\"\"
        json: bool = False
        \"\"\"Print one line of JSON.\"\"\"

Fields are bool (a flag), int, float, str, Path, Literal, tuples of these, one of these or None, and dataclasses, whose
fields become options `--section.key`. Imports nothing heavy: every rank of a job comes here.
"""

import argparse
import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from mpidp.errors import ConfigError
from mpidp.printable import listed
from mpidp.toml import nearest

T = TypeVar("T")

HELP = ("-h", "--help")
_METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}
_BOOLEANS = {"true": True, "True": True, "false": False, "False": False}


@dataclasses.dataclass(frozen=True)
class Arg:
    """How a field is read where its type does not say it.

    Attributes:
        metavar: what help calls its value.
        convert: makes the value of one word; its `ValueError` says what was expected.
        positional: whether it has no name on the command line.
        append: whether a tuple is one value each time that the option is given.
        is_prefix: whether a dataclass gives its name to the options of its fields.
        name: of the option, where it is not the field's.
    """

    metavar: str = ""
    convert: Callable[[str], Any] | None = None
    positional: bool = False
    append: bool = False
    is_prefix: bool = True
    name: str = ""


# One word with commas, as in --fields=x,y, so that options may come in any order.
Names = Annotated[tuple[str, ...], Arg("NAME,NAME", lambda word: tuple(word.split(",")))]


class HelpWanted(Exception):  # noqa: N818  (no error)
    """Somebody asked for help, which is this exception's text."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}. See {self.prog} --help.")


class _Help(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        raise HelpWanted(parser.format_help().rstrip())


def parse(kind: type[T], prog: str, words: Sequence[str], default: T | None = None) -> T:
    """Read all words of a command.

    Args:
        kind: the dataclass of its options; values that its `__post_init__` refuses are errors.
        prog: the command, such as "mpidp data convert".
        words: what follows it. Hyphens and underscores are the same in names of options.
        default: values of what is not given, instead of the class's own.

    Raises:
        ConfigError: a word that cannot be used.
        HelpWanted: -h or --help is among the words.
    """
    options, rest = parse_known(kind, prog, words, default)
    if rest:
        known = _parser(kind, prog, default, ())._option_string_actions
        name = rest[0].partition("=")[0]
        what = "option" if name.startswith("-") else "word"
        raise ConfigError(f"{prog}: unknown {what} {listed(rest, ' ')}.{nearest(name, known)} See {prog} --help.")
    return options


def parse_known(kind: type[T], prog: str, words: Sequence[str], default: T | None = None) -> tuple[T, list[str]]:
    """As `parse`, but return the words that are no options of this command instead of refusing them."""
    parser = _parser(kind, prog, default, words)
    names = {name.replace("-", "_"): name for name in parser._option_string_actions}
    found, rest = parser.parse_known_intermixed_args([_spelt(word, names) for word in words])
    return _made(kind, default, vars(found)), rest


def _parser(kind: type, prog: str, default: object, words: Sequence[str]) -> _Parser:
    parser = _Parser(
        prog,
        description=inspect.cleandoc(kind.__doc__ or ""),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=30),
        add_help=False,
        allow_abbrev=False,
    )
    parser.color = False  # type: ignore[attr-defined]  # Python 3.14 has it; what is printed is plain text
    parser.add_argument(*HELP, action=_Help, nargs=0, help="Show this text.")
    _add(parser, kind, default, "", is_help_wanted=any(word in HELP for word in words))
    places = [action.metavar for action in parser._actions if not action.option_strings]
    parser.usage = " ".join([prog, "[OPTIONS]", *map(str, places)])
    return parser


def _spelt(word: str, names: Mapping[str, str]) -> str:
    """A word whose option is spelt as the parser knows it."""
    name, equals, value = word.partition("=")
    return names.get(name.replace("-", "_"), name) + equals + value if word.startswith("--") else word


def _fields(kind: type, default: object) -> Iterator[tuple[dataclasses.Field[Any], Any, Arg, Any]]:
    """Yield each field of a dataclass with its plain type, its `Arg` and its default."""
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint, args = hints[field.name], [Arg()]
        while get_origin(hint) is Annotated:
            hint, *more = get_args(hint)
            args += [arg for arg in more if isinstance(arg, Arg)]
        value = field.default if default is None else getattr(default, field.name)
        yield field, hint, args[-1], value


def _add(container: Any, kind: type, default: object, prefix: str, is_help_wanted: bool) -> None:
    helps = _helps(kind) if is_help_wanted else {}
    for field, hint, arg, value in _fields(kind, default):
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(hint):
            inner = f"{name}." if arg.is_prefix else prefix
            is_group = arg.is_prefix and isinstance(container, _Parser)  # argparse has no groups in groups
            group = container.add_argument_group(name, hint.__doc__) if is_group else container
            _add(group, hint, value, inner, is_help_wanted)  # type: ignore[arg-type]  # a class, no instance
        elif get_origin(hint) is dict:
            for key, section in _sections(value):
                _add(container, type(section), section, f"{name}.{key}.", is_help_wanted)
        else:
            text = helps.get(field.name, "") + _default_text(value, hint)
            _add_one(container, name, hint, arg, value, text.replace("%", "%%"))


def _sections(value: Any) -> list[tuple[str, Any]]:
    """Return the dataclasses in a dict by name; keyword arguments of other kinds have no options."""
    entries = value.items() if isinstance(value, Mapping) else ()
    return [(key, section) for key, section in entries if dataclasses.is_dataclass(section)]


def _add_one(container: Any, name: str, hint: Any, arg: Arg, value: Any, help_text: str) -> None:
    is_setting = "." in name
    kind, is_many = _kind(hint)
    keywords: dict[str, Any] = {"help": help_text, "default": argparse.SUPPRESS}
    if kind is bool and not is_setting:
        keywords["action"] = "store_true"
    else:
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        keywords["metavar"] = arg.metavar or ("{" + ",".join(choices) + "}" if choices else _METAVARS.get(kind, ""))
        keywords["type"] = _convert(arg.convert or (str if choices else _boolean if kind is bool else kind))
        if choices:
            keywords["choices"] = choices
        if kind is bool:
            keywords["metavar"] = "{true,false}"
        if arg.append:
            keywords["action"] = "append"
    is_required = value is dataclasses.MISSING
    if is_many and not arg.append and arg.convert is None:
        keywords["nargs"] = "+" if is_required else "*"
    if arg.positional:
        if not is_required:  # argparse would take SUPPRESS for what was given
            keywords |= {"default": value} if is_many else {"default": value, "nargs": "?"}
        container.add_argument(name, **keywords)
    else:
        spelling = arg.name or (name if is_setting else name.replace("_", "-"))
        container.add_argument(f"--{spelling}", dest=name, **keywords)


def _kind(hint: Any) -> tuple[Any, bool]:
    """Return the type of one value, and whether there are many of it."""
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (kind for kind in get_args(hint) if kind is not NoneType)
    return (get_args(hint)[0], True) if get_origin(hint) is tuple else (hint, False)


def _convert(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let argparse show what a converter says."""

    def read(word: str) -> Any:
        try:
            return convert(word)
        except ValueError as error:
            expected = {int: f"{word!r} is no integer", float: f"{word!r} is no number"}
            raise argparse.ArgumentTypeError(expected.get(convert, str(error))) from None  # type: ignore[call-overload]

    return read


def _boolean(word: str) -> bool:
    if word not in _BOOLEANS:
        raise ValueError(f"{word!r}; expected true or false")
    return _BOOLEANS[word]


def _made(kind: type[T], default: T | None, values: Mapping[str, Any], prefix: str = "") -> T:
    """Return an instance of a dataclass of what was given."""
    given: dict[str, Any] = {}
    for field, hint, arg, value in _fields(kind, default):
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(hint):
            inner = f"{name}." if arg.is_prefix else prefix
            given[field.name] = _made(hint, value, values, inner)  # type: ignore[arg-type]  # a class, no instance
        elif sections := _sections(value):
            made = {key: _made(type(section), section, values, f"{name}.{key}.") for key, section in sections}
            given[field.name] = {**value, **made}
        elif name in values:
            given[field.name] = tuple(values[name]) if isinstance(values[name], list) else values[name]
    return kind(**given) if default is None else dataclasses.replace(default, **given)  # type: ignore[type-var]


def _default_text(value: Any, hint: Any) -> str:
    if value is dataclasses.MISSING or value in ("", None, ()) or (value is False and "bool" in str(hint)):
        return ""
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else value
    return f" (default: {' '.join(map(str, text)) if isinstance(text, tuple) else text})"


def _helps(kind: type) -> dict[str, str]:
    """Return the text under each field of a dataclass."""
    texts: dict[str, str] = {}
    for each in reversed([base for base in kind.__mro__ if dataclasses.is_dataclass(base)]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(tree, ast.ClassDef)
        for node, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(node, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                texts[ast.unparse(node.target)] = " ".join(str(text.value.value).split())
    return texts
