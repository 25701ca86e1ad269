"""The command `mpidp report`: reads run folders and writes a page about them. Needs neither torch nor MPI."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mpidp.errors import ConfigError
from mpidp.options import Arg
from mpidp.tools.report.run import read
from mpidp.tools.table import size_text


@dataclass(frozen=True)
class ReportOptions:
    """Write a page about a run, or about several beside each other: one HTML file that needs nothing else.

    It holds what was run, curves, where the time went, restarts, lost ranks, checkpoints and the configuration.
    """

    runs: Annotated[tuple[Path, ...], Arg("RUN_FOLDER", positional=True)]
    """Folders of runs, such as runs/digits."""
    output: Path | None = None
    """File to write; else report.html in the first run's folder. An older report is overwritten."""


NAME = "report.html"
# The mark of a report lies within so many characters of its beginning.
_HEAD = 500


def report_by(options: ReportOptions) -> str:
    """Write what the command line asks for; as `report`."""
    return report(options.runs, options.output)


def report(paths: Sequence[Path], output: Path | None) -> str:
    """Writes a page about one run, or about several beside each other; returns what was written, in words.

    Args:
        paths: folders of runs, at least one.
        output: the file; None for `report.html` in the first run's folder. An older report is overwritten.

    Raises:
        ConfigError: a folder is no run or has recorded nothing; matplotlib is missing; the file is something else or
            cannot be written.
    """
    runs = [read(path, label) for path, label in zip(paths, labels(list(paths)), strict=True)]
    try:
        from mpidp.tools.report.page import MARK, page
    except ImportError as error:
        raise ConfigError(f"mpidp report draws with a package: pip install 'mpidp[report]' ({error})") from error
    target = output or paths[0] / NAME
    _check(target, MARK)
    text = page(runs)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.unlink(missing_ok=True)
        with open(partial, "x", encoding="utf-8", errors="backslashreplace") as file:  # through no link of that name
            file.write(text)
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"{target} cannot be written: {error.strerror}. Give another place: --output FILE") from error
    what = ", ".join(f"{run.label} to step {run.last_step:,}" for run in runs)
    return f"{target}: {what}; {size_text(target.stat().st_size)}"


def labels(paths: list[Path]) -> list[str]:
    """Names of runs for legends: of their folders, or the paths where these are the same.

    Raises:
        ConfigError: a run is given twice.
    """
    resolved = [path.resolve() for path in paths]
    for number, path in enumerate(resolved):
        if path in resolved[:number]:
            raise ConfigError(f"{paths[number]} is given twice. Give each run once.")
    names = [path.name for path in resolved]
    chosen = names if len(set(names)) == len(names) else list(map(str, paths))
    # matplotlib passes over what begins with "_"; control characters are not XML.
    return [("./" if name.startswith("_") else "") + _printable(name) for name in chosen]


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


def _check(target: Path, mark: str) -> None:
    """Refuses to overwrite what is not a report."""
    if not target.exists():
        return
    try:
        with open(target, encoding="utf-8", errors="replace") as file:
            is_report = mark in file.read(_HEAD)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}. Give another place: --output FILE") from error
    if not is_report:
        raise ConfigError(f"{target} exists and is no report; it is not overwritten. Give another name: --output FILE")
