"""`mpidp train`: alone, or as one of many ranks."""

import os
from functools import partial
from typing import TYPE_CHECKING

from mpidp.commands.words import DONE, HELP, STOPPED_EARLY, parsed, say, speaks
from mpidp.errors import ConfigError
from mpidp.world import signals
from mpidp.world.launch import launch_facts

if TYPE_CHECKING:
    from mpidp.options import TrainOptions


def train(words: list[str]) -> int:
    """Train, or print the configuration or the plan."""
    from mpidp.options import parse

    facts = launch_facts(os.environ)
    if (facts.size or 1) > 1 and not _answers_without_mpi(words):
        return _train_together(words)
    options = parsed(lambda: parse(words, console_outputs=facts.speaks))
    if options.print_config or options.dry_run:
        signals.unwatch()  # there is nothing to save
        return _print_config(options) if options.print_config else _dry_run(options)
    signals.watch()
    from mpidp.train.trainer import train

    return STOPPED_EARLY if train(options.config, options.resume) else DONE


def _train_together(words: list[str]) -> int:
    """Train as one of many ranks: a run file that a single rank cannot read must not leave the others waiting."""
    signals.watch()
    from mpidp.options import parse
    from mpidp.train.trainer import train
    from mpidp.world.exit import leave
    from mpidp.world.start import init

    world = init()
    with world.raise_on_all_ranks("reading the run file and the command line"):
        try:
            options = parse(words, console_outputs=world.rank == 0)
        except SystemExit as end:  # the parser has printed what is wrong, on rank 0
            raise ConfigError(f"this cannot be used: mpidp train {' '.join(words)}") from end
    if train(options.config, options.resume):
        leave(world, STOPPED_EARLY)
    return DONE


def _answers_without_mpi(words: list[str]) -> bool:
    return any(word.replace("_", "-") in (*HELP, "--dry-run", "--print-config") for word in words)


def _print_config(options: "TrainOptions") -> int:
    from mpidp.config import to_toml

    say(to_toml(options.config).rstrip("\n"))
    return DONE


def _dry_run(options: "TrainOptions") -> int:
    if not speaks():
        return DONE  # one process answers for all
    from mpidp.tools.plan import plan
    from mpidp.train.components import build_model, build_optimizer

    model = build_model(options.config)
    make_optimizer = partial(build_optimizer, options.config.optimizer)
    say(plan(options.config, model, make_optimizer, options.ranks or launch_facts(os.environ).size or 1))
    return DONE
