"""What all commands share: words in, what is printed and an exit code out.

Under a launcher every rank runs the same command, and one of them speaks.
"""

import difflib
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from mpidp.errors import ConfigError
from mpidp.printable import visible
from mpidp.world.current import current_world
from mpidp.world.launch import launch_facts

if TYPE_CHECKING:
    from mpidp.world.world import World

T = TypeVar("T")
Command = Callable[[list[str]], int]

DONE, FAILED, USAGE, STOPPED_EARLY, INTERRUPTED, UNREAD = 0, 1, 2, 75, 130, 141
HELP = ("-h", "--help")


class Answered(Exception):  # noqa: N818  (no error)
    """The parser has printed help, or what is wrong; `code` is what the command ends with."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


def dispatch(words: list[str], commands: Mapping[str, Command], prefix: str, usage: str) -> int:
    """Answer help, or hand the remaining words to the command that the first word names."""
    if not words or words[0] in HELP:
        say(usage)
        return DONE if words else USAGE
    name, *rest = words
    if name in commands:
        return commands[name](rest)
    close = difflib.get_close_matches(name, commands, n=1)
    hint = f" Did you mean {prefix} {close[0]}?" if close else ""
    known = ", ".join(commands)
    raise ConfigError(f"unknown command {prefix} {name}.{hint} Known: {known}. See {prefix} --help.")


def parsed(parse: Callable[[], T]) -> T:
    """Return what a parser makes of the words; raises `Answered` where it has ended the command by itself."""
    try:
        return parse()
    except SystemExit as end:
        raise Answered(DONE if end.code in (None, 0) else USAGE) from None


def speaks() -> bool:
    """Whether this process is the one that prints: rank 0, which is another one when the first has died."""
    world = started_world()
    return launch_facts(os.environ).speaks if world is None else world.rank == 0


def started_world() -> "World | None":
    """Return this process's world if it has been started, without importing what would start MPI."""
    return current_world()


def say(text: str) -> None:
    """Print on the standard output, once a job."""
    if speaks():
        print(visible(text))


def complain(text: str) -> None:
    """Print on the standard error, once a job."""
    if speaks():
        print(f"mpidp: error: {visible(text)}", file=sys.stderr)
