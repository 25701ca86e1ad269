"""docs/reference/messages.md: every text on the page is one of the package's (Behaviour 60)."""

from __future__ import annotations

import ast
import re

from page_commands import ROOT

PAGE = (ROOT / "docs/reference/messages.md").read_text()


def texts_of_the_package() -> list[str]:
    """All texts in its sources; of an f-string the parts around its values, one by one."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "mpidp").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def test_every_message_is_in_the_package() -> None:
    known = texts_of_the_package()
    messages = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
    assert len(messages) > 50
    parts = {part.strip() for message in messages for part in message.split("...")}
    missing = [part for part in sorted(parts) if not any(part in text for text in known)]
    assert not missing, "these are no longer said; mend docs/reference/messages.md"
