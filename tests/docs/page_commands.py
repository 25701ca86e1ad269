"""Find the shell commands on a page: fenced, indented, or within a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [
    "README.md",
    *sorted(str(path.relative_to(ROOT)) for path in DOCS.rglob("*.md") if "decisions" not in path.parts),
]
TUTORIAL = ["docs/tutorial/laptop.md", "docs/tutorial/data.md", "docs/tutorial/loop.md"]  # typed word by word
SHELLS = ("console", "bash", "sh", "shell")
# What a command begins with where no fence says that it is one; variables may stand before it.
PROGRAM = re.compile(
    r"(?:[A-Z]\w*=\S* )*(?:\S*/)?"
    r"(?:mpiexec|mpirun|mpidp|srun|sbatch|scancel|python3?|pip|make|touch|module|[\w/]+\.py) "
)
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"mpidp [a-z]+(?: [a-z]+)?")  # `mpidp data convert` in a sentence names it, and is not to be typed


@dataclass(frozen=True)
class Command:
    """A command as it is to be typed, without its comment, and the lines that the page shows as its output."""

    text: str
    output: tuple[str, ...] = ()


def commands(text: str) -> list[Command]:
    """All commands of a page, in their order within fences, then the others."""
    fences = FENCE.findall(text)
    prose = FENCE.sub("", text)
    found = [command for shell, block in fences if shell in SHELLS for command in _of_block(block, shell == "console")]
    indented = (line.strip() for line in prose.splitlines() if line.startswith("    "))
    within = (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose))
    found += [Command(_without_comment(line)) for line in indented if PROGRAM.match(line)]
    found += [Command(span) for span in within if PROGRAM.match(span) and not NAME.fullmatch(span)]
    return found


def _of_block(block: str, has_prompt: bool) -> Iterator[Command]:
    """The commands of a fenced block; with a prompt the other lines are output."""
    typed, output = "", list[str]()
    for line in map(str.strip, re.sub(r"\\\n\s*", "", block).splitlines()):
        if has_prompt and not line.startswith("$ "):
            output.append(line)
        elif line and not line.startswith("#"):
            if typed:
                yield Command(typed, tuple(output))
            typed, output = _without_comment(line.removeprefix("$ ")), []
    if typed:
        yield Command(typed, tuple(output))


def _without_comment(line: str) -> str:
    return re.sub(r"\s+#\s.*", "", line).strip()
