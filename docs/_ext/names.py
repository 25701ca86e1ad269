"""Sphinx extension: docstrings in this project's form, and names in code style as links to what they stand for.

Docstrings are Google style with Markdown's `code` and indented blocks of code. A page that names something of mpidp
in code style that is not in the API reference, such as a method that was renamed, fails the build.
"""

import re
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

import mpidp

_NAME = re.compile(r"(?:mpidp\.)?([A-Za-z]\w*(?:\.\w+)*)(?:\(.*\))?")
_OTHERS = {"rank"}  # the logger `mpidp.rank`


def convert_docstring(_app: Sphinx, what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Turns Markdown's `code` and indented blocks into reStructuredText, in place."""
    converted = [""] if what == "property" else []  # else napoleon takes text before a colon for the property's type
    depth, is_code = 0, False
    for line in lines:
        indent = len(line) - len(line.lstrip())
        is_code = is_code and (indent > depth or not line.strip())
        begins = not is_code and converted and not converted[-1].strip() and indent > depth and line.strip()
        if begins:
            converted += [" " * depth + ".. code-block:: python", ""]
            is_code = True
        if not is_code and line.strip():
            depth = indent
        converted.append(line if is_code else _prose(line))
    lines[:] = converted


def _prose(line: str) -> str:
    parts = line.split("`")
    for index, part in enumerate(parts):
        if index % 2:
            parts[index] = f"``{part}``"
        else:
            plural = r"\ " if index and re.match(r"\w", part) else ""
            parts[index] = plural + re.sub(r"(?<=\w)_(?=\W|$)|\*(?!\s)|\|", r"\\\g<0>", part)
    return "".join(parts)


def link_names(_app: Sphinx, doctree: nodes.document) -> None:
    """Makes names in code style links to the API reference, and the build fail where there is none."""
    for literal in list(doctree.findall(nodes.literal)):
        match = _NAME.fullmatch(literal.astext())
        if not match or isinstance(literal.parent, nodes.reference | pending_xref):
            continue
        name = match.group(1).replace("shares.", "Shares.")  # `shares = mpidp.shares(...)`
        if name in _OTHERS or "__" in name:
            continue
        if literal.astext().startswith("mpidp.") or name.split(".")[0] in mpidp._HOMES:
            link = pending_xref("", refdomain="py", reftype="obj", reftarget=f"mpidp.{name}", refexplicit=True)
            link["refwarn"] = True
            literal.replace_self(link)
            link += literal


def find_public_name(_app: Sphinx, env: Any, node: pending_xref, content: nodes.TextElement) -> nodes.reference | None:
    """Resolves the name of a class at its home, as signatures have it, to its public name."""
    target = node.get("reftarget", "")
    for name, home in mpidp._HOMES.items():
        if target in (f"{home}.{name}", name):
            domain = env.get_domain("py")
            return domain.resolve_xref(env, node["refdoc"], env.app.builder, "obj", f"mpidp.{name}", node, content)
    return None


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects the handlers; docstrings are converted before napoleon reads them."""
    app.connect("autodoc-process-docstring", convert_docstring, priority=400)
    app.connect("doctree-read", link_names)
    app.connect("missing-reference", find_public_name)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
