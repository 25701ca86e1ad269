"""`mpidp train`: its options, and training as one process or as one of many ranks.

Defaults < run file < command line. Keyword arguments are read here, `--SECTION.arguments.NAME=VALUE`, because their
names are the model's or the optimizer's own: they need not be in the run file, and TOML types their values.
"""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from mpidp import config as settings
from mpidp import toml
from mpidp.config import RunConfig
from mpidp.errors import ConfigError
from mpidp.options import HELP, Arg, parse
from mpidp.validate import validate
from mpidp.world import signals
from mpidp.world.launch import launch_facts

DONE, STOPPED_EARLY = 0, 75
_ARGUMENT_SECTIONS = [key for key, section in dataclasses.asdict(RunConfig()).items() if "arguments" in section]


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """Train a model on HDF5 files: mpidp train RUN.toml [--SECTION.KEY=VALUE ...].

    The run file comes first; options given here win over it. Under mpiexec or srun every process is one rank.
    Keyword arguments are options too: --model.arguments.width=64, --optimizer.arguments.weight_decay=0.1.

    A run file is a program: the modules that its module:function names stand for are imported and called, by
    --dry-run too. Run only files that you would run as a script; --print-config imports nothing of theirs.
    """

    resume: Annotated[Path | None, Arg("RUN_FOLDER")] = None
    """Run folder to continue from its newest complete checkpoint; auto for this run's newest, or a new run."""
    dry_run: bool = False
    """Print shards, buckets and memory for --ranks ranks, then exit; builds the run file's model, starts no MPI."""
    ranks: int = 0
    """Number of ranks that --dry-run plans for; 0 for as many as the launcher started."""
    print_config: bool = False
    """Print the effective configuration as TOML, then exit; starts no MPI."""
    config: Annotated[RunConfig, Arg(is_prefix=False)] = dataclasses.field(default_factory=RunConfig)


def train(words: Sequence[str]) -> int | str:
    """Train, and return the exit code; or return the configuration or the plan, as text."""
    facts = launch_facts(os.environ)
    answers_without_mpi = any(word.replace("_", "-") in (*HELP, "--dry-run", "--print-config") for word in words)
    if (facts.size or 1) > 1 and not answers_without_mpi:
        return _train_on_ranks(words)
    options = read_options(words)
    if options.print_config or options.dry_run:
        signals.unwatch()  # there is nothing to save
        if options.print_config:
            return settings.to_toml(options.config).rstrip("\n")
        return _plan(options, facts.size or 1) if facts.speaks else DONE
    signals.watch()
    from mpidp.train.trainer import train as run

    return STOPPED_EARLY if run(options.config, options.resume) else DONE


def _train_on_ranks(words: Sequence[str]) -> int:
    """Train as one of many ranks: a run file that a single rank cannot read must not leave the others waiting."""
    signals.watch()
    from mpidp.train.trainer import train as run
    from mpidp.world.exit import leave
    from mpidp.world.start import init

    world = init()
    with world.raise_on_all_ranks("reading the run file and the command line"):
        options = read_options(words)
    if run(options.config, options.resume):
        leave(init(), STOPPED_EARLY)  # the ranks that are left now, where some have died
    return DONE


def _plan(options: TrainOptions, ranks: int) -> str:
    from mpidp.tools.plan import plan
    from mpidp.train.components import build_model, build_optimizer

    model = build_model(options.config)
    make_optimizer = partial(build_optimizer, options.config.optimizer)
    return plan(options.config, model, make_optimizer, options.ranks or ranks)


def read_options(words: Sequence[str]) -> TrainOptions:
    """Read the words after `mpidp train`.

    Raises:
        ConfigError: a run file or value that cannot be used.
        HelpWanted: -h or --help is among the words.
    """
    file = words[0] if words and not words[0].startswith("-") else None
    late = next((word for word in words if word.endswith(".toml") and not word.startswith("-")), None)
    if file is None and late is not None:
        raise ConfigError(f"the run file comes first: mpidp train {late} ...; found it after {words[0]}.")
    rest, arguments = _take_arguments(words[1:] if file else words)
    config = _with_arguments(settings.load(file) if file else RunConfig(), arguments)
    options = parse(TrainOptions, f"mpidp train {file or 'RUN.toml'}", rest, TrainOptions(config=config))
    if options.ranks < 0:
        raise ConfigError(f"--ranks={options.ranks}; expected a number of ranks, or 0 for those started.")
    if options.ranks and not options.dry_run:
        raise ConfigError("--ranks is for --dry-run; otherwise mpiexec -n or srun -n sets the number of ranks.")
    validate(options.config)
    return options


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
