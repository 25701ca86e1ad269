"""The name of a module enters, the line that it prints as a process of its own leaves, or why there is none.

What may crash, or start MPI, is asked in a child. It is told nothing of the launcher, lest it be taken for a rank.
"""

import os
import subprocess
import sys
from dataclasses import dataclass

from mpidp.world.launch import without_launcher

TIMEOUT_S = 30.0
_ERROR_LINES = 3


@dataclass(frozen=True)
class Answer:
    """The last line that a child printed, or what went wrong; one of both is ""."""

    line: str
    error: str


class Child:
    """A child at work: it starts at construction, so that several may work at once."""

    def __init__(self, module: str, *words: str):
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            env=without_launcher(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

    def answer(self, timeout_s: float = TIMEOUT_S) -> Answer:
        """Wait for its end."""
        try:
            output, complaints = self._process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return Answer("", f"no answer within {timeout_s:.0f} s")
        lines = [line for line in output.splitlines() if line.startswith("{")]
        if self._process.returncode == 0 and lines:
            return Answer(lines[-1], "")
        last = " | ".join(line.strip() for line in complaints.strip().splitlines()[-_ERROR_LINES:])
        return Answer("", f"exit code {self._process.returncode}: {last or 'no message'}")
