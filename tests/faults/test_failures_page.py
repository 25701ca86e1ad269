"""docs/reference/failures.md: every message on the page is one that a real job prints (behaviour 50)."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from page_cases import CASES, program

from jobs import ROOT, run_job

PAGE = (ROOT / "docs/reference/failures.md").read_text()
QUOTED = dict(re.findall(r"<!-- case: (\w+) -->\n```\n(.*?)```\n", PAGE, re.DOTALL))


def test_every_case_is_on_the_page() -> None:
    assert set(QUOTED) == set(CASES) - {"sigkill"}  # its words are the launcher's


@pytest.mark.parametrize("case", CASES)
def test_the_messages_are_real(tmp_path: Path, case: str) -> None:
    """Behaviours 30 to 35, and 50."""
    (tmp_path / "train.py").write_text(program(case))
    result = run_job(["train.py"], 3, timeout_s=60, cwd=tmp_path)
    code = CASES[case][1]
    assert result.code == code or (code is None and result.code != 0), result.output
    rest = _plain(result.output)
    for line in QUOTED.get(case, "").splitlines():
        if line != "...":
            _, found, rest = rest.partition(_plain(line))
            assert found, f"{line!r} does not come, after what was found, in:\n{result.output}"


def _plain(text: str) -> str:
    """Without what changes from machine to machine and run to run: host, and how many seconds passed."""
    return re.sub(r"\b\d+ s\b", "N s", text.replace(socket.gethostname(), "vm"))
