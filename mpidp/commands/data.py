"""`mpidp data`: look at data, check it, convert it, make some."""

import os
from typing import TYPE_CHECKING, TypeVar

from mpidp.commands.words import DONE, FAILED, HELP, dispatch, parsed, say, speaks, started_world
from mpidp.errors import ConfigError
from mpidp.printable import listed
from mpidp.world.launch import launch_facts

if TYPE_CHECKING:
    from mpidp.tools.data.options import ConvertOptions, MakeOptions, VerifyOptions

DataOptions = TypeVar("DataOptions", bound="VerifyOptions | ConvertOptions | MakeOptions")

USAGE_TEXT = """usage: mpidp data COMMAND ...

Look at data, check it, bring it into HDF5 files that are read fast, or make some.

commands:
  inspect FILE                  datasets (shape, dtype, layout, chunks, filters, size, attributes), what the loader
                                makes of them, and advice
  verify FILE ...               read and decode every chunk and name what is wrong; alone or under mpiexec or srun
  convert SOURCE ... TARGET     write .npy, .npz, a folder of images, CSV or HDF5 as HDF5, on all cores of this node
  make TARGET --field=...       write synthetic data that can be learnt

mpidp data COMMAND --help lists the options"""


def data(words: list[str]) -> int:
    """Run one of them."""
    commands = {"inspect": _inspect, "verify": _verify, "convert": _convert, "make": _make}
    return dispatch(words, commands, "mpidp data", USAGE_TEXT)


def _inspect(words: list[str]) -> int:
    if any(word in HELP for word in words):
        say(USAGE_TEXT)
        return DONE
    if len(words) != 1:
        raise ConfigError(f"mpidp data inspect takes one FILE; found {len(words)} words: {listed(words, ' ')}")
    from mpidp.tools.data.inspect import inspect

    text, is_sound = inspect(words[0])
    say(text)
    return DONE if is_sound else FAILED


def _verify(words: list[str]) -> int:
    from mpidp.tools.data.options import VerifyOptions

    options = _options(VerifyOptions, words)
    from mpidp.tools.data.verify import verify_by

    text, is_sound = verify_by(options)
    say(text)
    if not is_sound and (world := started_world()) is not None:
        world.guard.remove()  # all ranks leave with this code: nobody has to be told
    return DONE if is_sound else FAILED


def _convert(words: list[str]) -> int:
    from mpidp.tools.data.options import ConvertOptions

    options = _options(ConvertOptions, words)
    _check_alone("convert")
    from mpidp.tools.data.convert import convert_by

    say(convert_by(options))
    return DONE


def _make(words: list[str]) -> int:
    from mpidp.tools.data.options import MakeOptions

    options = _options(MakeOptions, words)
    _check_alone("make")
    from mpidp.tools.data.convert import make_by

    say(make_by(options))
    return DONE


def _options(kind: type[DataOptions], words: list[str]) -> DataOptions:
    from mpidp.tools.data.options import parse

    return parsed(lambda: parse(kind, words, console_outputs=speaks()))


def _check_alone(command: str) -> None:
    size = launch_facts(os.environ).size or 1
    if size > 1:
        raise ConfigError(
            f"mpidp data {command} spreads its work over the cores of one node by itself; start it without mpiexec "
            f"or srun, which started {size} of it, or with one task of many CPUs."
        )
