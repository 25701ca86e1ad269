"""The words after `mpidp report` enter, an options dataclass leaves. Starts no MPI."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from mpidp.errors import ConfigError


@dataclass(frozen=True)
class ReportOptions:
    """Write a page about a run, or about several beside each other: one HTML file that needs nothing else.

    It holds what was run, curves, where the time went, restarts, lost ranks, checkpoints and the configuration.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN_FOLDER [RUN_FOLDER ...]")]
    """Folders of runs, such as runs/digits."""
    output: Path | None = None
    """File to write; else report.html in the first run's folder. An older report is overwritten."""


def parse(words: Sequence[str]) -> ReportOptions:
    """Read the words after `mpidp report`.

    Raises:
        SystemExit: 0 after help, 2 after an error that the parser has printed.
        ConfigError: no folder is given.
    """
    options = tyro.cli(ReportOptions, prog="mpidp report", args=words)
    if not options.runs:
        raise ConfigError("mpidp report takes the folder of a run, or several: mpidp report runs/NAME")
    return options
