"""The words after `mpidp train` enter, a `TrainOptions` leaves: defaults < run file < command line.

Parsing and help are tyro's. Only `--SECTION.arguments.NAME=VALUE` is read here, because those names are the
model's or the optimizer's own: they need not be in the run file, and TOML types their values.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from mpidp import config as settings
from mpidp import toml
from mpidp.config import RunConfig
from mpidp.errors import ConfigError

DESCRIPTION = """Train a model on HDF5 files: mpidp train RUN.toml [--SECTION.KEY=VALUE ...]

The run file comes first; options given here win over it. Under mpiexec or srun every process is one rank.
Keyword arguments are options too: --model.arguments.width=64, --optimizer.arguments.weight_decay=0.1.

A run file is a program: the modules that its module:function names stand for are imported and called, by --dry-run
too. Run only files that you would run as a script; --print-config imports nothing of theirs."""

# As a run file spells them, and as tyro does.
_BOOLEANS = {"true": "True", "false": "False"}
_BOOLEAN_OPTIONS = {
    f"--{section}.{key}"
    for section, values in dataclasses.asdict(RunConfig()).items()
    for key, value in values.items()
    if isinstance(value, bool)
}
_ARGUMENT_SECTIONS = {key for key, section in dataclasses.asdict(RunConfig()).items() if "arguments" in section}


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """What `mpidp train` was asked to do."""

    config: Annotated[tyro.conf.FlagConversionOff[RunConfig], tyro.conf.arg(name="")]
    resume: Annotated[Path | None, tyro.conf.arg(metavar="RUN_FOLDER")] = None
    """Run folder to continue from its newest complete checkpoint; auto for this run's newest, or a new run."""
    dry_run: Annotated[bool, tyro.conf.arg(aliases=["--dry-run"])] = False
    """Print shards, buckets and memory for --ranks ranks, then exit; builds the run file's model, starts no MPI."""
    ranks: int = 0
    """Number of ranks that --dry-run plans for; 0 for as many as the launcher started."""
    print_config: Annotated[bool, tyro.conf.arg(aliases=["--print-config"])] = False
    """Print the effective configuration as TOML, then exit; starts no MPI."""


def parse(words: Sequence[str], console_outputs: bool = True) -> TrainOptions:
    """Read the words after `mpidp train`.

    Raises `ConfigError` for a run file or value that cannot be used; `SystemExit` 0 after help, and 2 after
    an error that tyro has printed (if `console_outputs`).
    """
    file = words[0] if words and not words[0].startswith("-") else None
    if file is None:
        _check_no_late_file(words)
    base = settings.load(file) if file else RunConfig()
    rest, arguments = _take_arguments(words[1:] if file else words)
    options = tyro.cli(
        TrainOptions,
        prog=f"mpidp train {file or 'RUN.toml'}",
        description=DESCRIPTION,
        args=_spell_booleans(rest),
        default=TrainOptions(_with_arguments(base, arguments)),
        use_underscores=True,  # as the keys in the file are spelt; hyphens are understood too
        console_outputs=console_outputs,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    _check(options)
    return options


def _check_no_late_file(words: Sequence[str]) -> None:
    late = next((word for word in words if word.endswith(".toml") and not word.startswith("-")), None)
    if late is not None:
        raise ConfigError(f"the run file comes first: mpidp train {late} ...; found it after {words[0]}.")


def _check(options: TrainOptions) -> None:
    if options.ranks < 0:
        raise ConfigError(f"--ranks={options.ranks}; expected a number of ranks, or 0 for those started.")
    if options.ranks and not options.dry_run:
        raise ConfigError("--ranks is for --dry-run; otherwise mpiexec -n or srun -n sets the number of ranks.")
    settings.validate(options.config)


def _take_arguments(words: Sequence[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Split off every `--SECTION.arguments.NAME=VALUE` (or `... VALUE`) as section -> name -> value."""
    rest: list[str] = []
    taken: dict[str, dict[str, Any]] = {}
    remaining = iter(words)
    for word in remaining:
        section, _, name = word.partition(".arguments.")
        if name and section.removeprefix("--") in _ARGUMENT_SECTIONS and section.startswith("--"):
            key, value = _key_and_value(name, word, remaining)
            taken.setdefault(section.removeprefix("--"), {})[key] = toml.parse_value(value)
        else:
            rest.append(word)
    return rest, taken


def _spell_booleans(words: Sequence[str]) -> list[str]:
    """Let `--SECTION.KEY=true`, or `... true`, be as good as True."""
    spelt: list[str] = []
    option = ""  # the one that a word by itself belongs to
    for word in words:
        name, has_value, value = word.partition("=")
        if _underscored(option) in _BOOLEAN_OPTIONS:
            spelt.append(_BOOLEANS.get(word, word))
        elif has_value and _underscored(name) in _BOOLEAN_OPTIONS:
            spelt.append(f"{name}={_BOOLEANS.get(value, value)}")
        else:
            spelt.append(word)
        option = word
    return spelt


def _underscored(option: str) -> str:
    return option[:2] + option[2:].replace("-", "_")


def _key_and_value(name: str, word: str, remaining: Iterator[str]) -> tuple[str, str]:
    key, has_value, value = name.partition("=")
    if not has_value:
        try:
            value = next(remaining)
        except StopIteration:
            raise ConfigError(f"{word} has no value; write {word}=VALUE.") from None
    return key.replace("-", "_"), value


def _with_arguments(config: RunConfig, arguments: dict[str, dict[str, Any]]) -> RunConfig:
    """Lay the command line's keyword arguments over those of the file."""
    for section, values in arguments.items():
        old = getattr(config, section)
        checked = toml.into(type(old), {"arguments": values}, "command line", section).arguments
        new = dataclasses.replace(old, arguments={**old.arguments, **checked})
        config = dataclasses.replace(config, **{section: new})
    return config
