"""docs/howto/data.md: every command and program on it is run as written, and its output is what the page shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import mpiexec

pytest.importorskip("PIL.Image")

PAGE = Path(__file__).parents[2] / "docs/howto/data.md"


def blocks() -> list[tuple[str, str]]:
    """(language, text) of each fenced block."""
    return re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[tuple[str, list[str]]]:
    """(command, lines that must be in its output) of each "$ " line."""
    found: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def comparable(line: str, folder: Path) -> str:
    """Paths without their folder; sizes depend on the compressor's version."""
    return re.sub(r"[\d.]+ ([KM]i)?B\b", "SIZE", line.replace(f"{folder}/", "")).rstrip()


def test_every_command_runs_as_written(tmp_path: Path) -> None:
    """Behaviour 50."""
    (tmp_path / "bin").mkdir()
    launcher = " ".join(mpiexec(0)[:-2])
    (tmp_path / "bin" / "mpiexec").write_text(f'#!/bin/sh\nexec {launcher} "$@"\n')
    (tmp_path / "bin" / "mpiexec").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}

    def run(words: list[str]) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
        return done.stdout

    count = 0
    for language, text in blocks():
        if language == "python":
            run([sys.executable, "-c", text])
            continue
        for command, expected in commands(text):
            lines = [comparable(line, tmp_path) for line in run(["bash", "-c", command]).splitlines()]
            count += 1
            for line in expected:
                assert comparable(line, tmp_path) in lines, (command, lines)
    assert count == 9
