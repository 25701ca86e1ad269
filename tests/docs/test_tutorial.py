"""The pages of the tutorial, typed word by word: files saved, commands run, outputs compared (Behaviour 60)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_table import TABLE, NotHere, Run
from page_commands import FENCE, ROOT, SHELLS, TUTORIAL, commands
from test_commands import check, place  # noqa: F401  (a fixture)


def file_name(before: str) -> str | None:
    """The file that a block is to be saved as: the last sentences before it name one."""
    found = re.findall(r"`([\w]+\.(?:py|toml))`", before.strip().split("\n\n")[-1])
    return found[-1] if found else None


@pytest.mark.longer
@pytest.mark.timeout(500)
@pytest.mark.parametrize("page", TUTORIAL)
def test_word_by_word(page: str, place: Path) -> None:  # noqa: F811
    """In a folder with the project's jobs and data."""
    text = (ROOT / page).read_text()
    saved = run = end = 0
    for fence in FENCE.finditer(text):
        language, block = fence.groups()
        if language in SHELLS:
            for command in commands(fence.group(0)):
                how = TABLE[page][command.text]
                if not isinstance(how, NotHere):
                    check(command, how if isinstance(how, Run) else Run(""), place)
                    run += 1
        else:
            name = file_name(text[end : fence.start()])
            assert name, f"{page}: no file is named before\n{block}"
            (place / name).write_text(block)
            saved += 1
        end = fence.end()
    assert saved and run
