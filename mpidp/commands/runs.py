"""`mpidp submit | status | report`: what a login node is for. None of them needs torch or MPI."""

from pathlib import Path

from mpidp.commands.words import DONE, HELP, parsed, say, speaks
from mpidp.errors import ConfigError
from mpidp.printable import listed

STATUS_USAGE_TEXT = """usage: mpidp status [RUN_FOLDER]

Print how far a run is (step, loss, time left, last checkpoint, restarts) and what Slurm says of its job; without a
folder, a line for each run in runs/."""


def submit(words: list[str]) -> int:
    """Write a batch script and submit it, or print it."""
    from mpidp import options as train_options
    from mpidp.tools.submit import parse

    options, job, config = parsed(lambda: parse(words, lambda settings: train_options.parse(settings).config))
    from mpidp.tools.submit import describe_submitted, render, submit

    say(render(job).rstrip("\n") if options.dry_run else describe_submitted(submit(job), job, config))
    return DONE


def status(words: list[str]) -> int:
    """Print how far runs are."""
    if any(word in HELP for word in words):
        say(STATUS_USAGE_TEXT)
        return DONE
    if len(words) > 1:
        raise ConfigError(f"mpidp status takes one RUN_FOLDER, or none; found {len(words)} words: {listed(words, ' ')}")
    from mpidp.tools.status import status

    say(status(Path(words[0]) if words else None))
    return DONE


def report(words: list[str]) -> int:
    """Write a page about runs."""
    if not speaks():
        return DONE  # one process answers for all
    from mpidp.tools.report.report import parse

    options = parsed(lambda: parse(words))
    from mpidp.tools.report.report import report

    say(report(options.runs, options.output))
    return DONE
