"""Every command on the README and the pages of docs/ is run as it is written (Behaviour 50)."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_table import BEFORE, TABLE, Elsewhere, Run
from page_commands import PAGES, ROOT, Command, commands

TIMEOUT_S = 300  # four ranks start Python several times, on machines of two cores


def of_page(page: str) -> list[Command]:
    return commands((ROOT / page).read_text())


def words(text: str) -> str:
    """Without the breaks and frames of a terminal."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


def without_measured(line: str) -> str:
    """A line of output without numbers, which reducer was the faster one, and what the page cuts off."""
    line = words(re.sub(r"\b(node|flat)\b", "REDUCER", line.removesuffix("...")))
    return re.sub(r"\d[\d,.]*\d|\d", "N", line)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder as the project's is for someone who types these commands, without the package itself."""
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs")
    (tmp_path / "data").mkdir()
    shutil.copy(ROOT / "data/digits.h5", tmp_path / "data")  # all data that a checkout has
    shutil.copy(ROOT / "Makefile", tmp_path)
    return tmp_path


def shell(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=cwd,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def check(command: Command, how: Run, cwd: Path) -> None:
    """Run a command, and assert that it ends and prints as the table and the page say."""
    text = command.text
    for part, here in how.instead:
        assert part in text, f"{part!r} is no longer in {command.text!r}"
        text = text.replace(part, here)
    done = shell(text, cwd)
    assert done.returncode == how.code, f"{text}\n{done.stdout}"
    shown = ".*".join(re.escape(words(part)) for part in how.shows.split("{}"))
    assert re.search(shown, words(done.stdout)), f"{how.shows!r} is not printed by {text}\n{done.stdout}"
    rest = [without_measured(line) for line in done.stdout.replace(f"{cwd}/", "").splitlines()]
    for line in command.output:
        found = [place for place, printed in enumerate(rest) if printed.startswith(without_measured(line))]
        assert line == "..." or found, f"{line!r} is not printed, after the line before it, by {text}\n{done.stdout}"
        rest = rest[found[0] + 1 :] if line != "..." else rest


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_in_the_table(page: str) -> None:
    assert {command.text for command in of_page(page)} == set(TABLE.get(page, {})), "fix tests/docs/command_table.py"


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("page", [page for page in TABLE if any(isinstance(how, Run) for how in TABLE[page].values())])
def test_commands_run(page: str, place: Path) -> None:
    """In the order of the page, in one folder."""
    for text in BEFORE.get(page, []):
        done = shell(text, place)
        assert done.returncode == 0, f"{text}\n{done.stdout}"
    for command in of_page(page):
        how = TABLE[page][command.text]
        if isinstance(how, Run):
            check(command, how, place)


def test_what_is_said_to_be_run_elsewhere_is_there() -> None:
    """A test of that name, or a line of .ci/run."""
    tests = {how.test for table in TABLE.values() for how in table.values() if isinstance(how, Elsewhere)}
    for test in tests:
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text()
        lines = {line.partition(" #")[0] for line in text.splitlines()}
        names = {node.name for node in ast.parse(text).body if hasattr(node, "name")} if file.endswith(".py") else lines
        assert name in names, test


def test_what_counts_as_a_command() -> None:
    page = """
Type `mpidp data make` or `python a.py
b`, or
```console
$ mpidp train a.toml \\
    --x 1   # and so on
says this
# and this
$ ls
```
  ```sh
  # first
  make x && srun y
  ```
    OMP_NUM_THREADS=1 .venv/bin/mpiexec -n 2 z
    mpidpx z
```python
mpidp train
```
"""
    assert commands(page) == [
        Command("mpidp train a.toml --x 1", ("says this", "# and this")),
        Command("ls"),
        Command("make x && srun y"),
        Command("OMP_NUM_THREADS=1 .venv/bin/mpiexec -n 2 z"),
        Command("python a.py b"),
    ]
