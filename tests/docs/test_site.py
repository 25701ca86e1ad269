"""The site that `make docs` builds: links, anchors, completeness, and how a browser shows it (Behaviour 60)."""

from __future__ import annotations

import dataclasses
import html
import importlib.util
import re
import shutil
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
from page_commands import ROOT

import mpidp
from mpidp.cli import COMMANDS
from mpidp.config import FieldSection, RunConfig

SITE = ROOT / "build/docs"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="Sphinx is missing; `make docs` installs it"),
]


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """Builds a site as the Makefile does."""
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fresh-env", "--fail-on-warning", "--builder", "html"]
    return subprocess.run([*command, source, target], capture_output=True, text=True)


class Page(HTMLParser):
    """Anchors and links of a page of HTML."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := values.get(name))}
        self.links += [value for name in ("href", "src") if (value := values.get(name)) is not None]


@pytest.fixture(scope="module")
def pages() -> dict[Path, Page]:
    """All pages of the site, brought up to date."""
    done = build(ROOT / "docs", SITE)
    assert done.returncode == 0, done.stderr
    return {path: Page(path.read_text()) for path in SITE.rglob("*.html")}


def links_within(page: Page) -> list[str]:
    """The links of a page that stay in its site."""
    return [link for link in page.links if not urlsplit(link).scheme and not link.startswith("//")]


def broken_links(pages: dict[Path, Page]) -> list[str]:
    """The links within a site that lead to no file, or to no anchor on it, each behind the name of its page."""
    return [
        f"{path.name}: {link}"
        for path, page in pages.items()
        for link in links_within(page)
        if not leads(path, link, pages)
    ]


def leads(path: Path, link: str, pages: dict[Path, Page]) -> bool:
    """Whether a link on a page leads anywhere."""
    place, anchor = urldefrag(link)
    place = unquote(urlsplit(place).path)
    target = (path.parent / place).resolve() if place else path
    has_anchors = target.suffix == ".html" and target.name not in ("search.html", "genindex.html")
    return target.is_file() and (not anchor or not has_anchors or unquote(anchor) in pages[target].anchors)


def test_links_and_anchors(pages: dict[Path, Page]) -> None:
    """Every link within the site leads to a file, and to an anchor on it."""
    broken = broken_links(pages)
    assert not broken, "\n".join(broken)
    assert sum(len(links_within(page)) for page in pages.values()) > 1000


def test_broken_links_and_anchors_are_found(tmp_path: Path) -> None:
    links = [
        "#here",
        "#gone",
        "b.html",
        "b.html#there",
        "b.html#lost",
        "c.html",
        "c.html#x",
        "https://example.org/c.html",
    ]
    texts = {"a.html": '<p id="here">' + "".join(f'<a href="{link}">' for link in links), "b.html": '<p id="there">'}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    broken = broken_links({tmp_path / name: Page(text) for name, text in texts.items()})
    assert broken == ["a.html: #gone", "a.html: b.html#lost", "a.html: c.html", "a.html: c.html#x"]


def test_every_public_name_is_in_the_api(pages: dict[Path, Page]) -> None:
    names = set(mpidp.__all__) | {f"errors.{name}" for name in vars(mpidp.errors) if name.endswith("Error")}
    names -= {"errors.ValueError"}
    inventory = (SITE / "objects.inv").read_bytes().split(b"\n", 4)[4]
    listed = {line.split()[0] for line in zlib.decompress(inventory).decode().splitlines() if " py:" in line}
    assert {f"mpidp.{name}" for name in names} <= listed


def test_every_setting_and_command_is_listed(pages: dict[Path, Page]) -> None:
    settings = pages[SITE / "reference/run_file.html"].anchors
    wanted = {
        f"{section.name}.{field.name}"
        for section in dataclasses.fields(RunConfig)
        for field in dataclasses.fields(getattr(RunConfig(), section.name))
    }
    wanted |= {f"data.field.NAME.{field.name}" for field in dataclasses.fields(FieldSection)}
    assert {re.sub("[._]", "-", key).lower() for key in wanted} <= settings
    text = html.unescape(re.sub(r"<[^>]*>", "", (SITE / "reference/commands.html").read_text()))
    for command in COMMANDS:
        assert f"mpidp {command.name} {command.takes}" in " ".join(text.split())
    assert "Seconds before the time limit at which all ranks save and stop" in text


@pytest.mark.parametrize(("name", "is_there"), [("mpidp.errors.DataError", True), ("mpidp.World.bcast", False)])
def test_a_page_that_names_a_missing_symbol_fails(name: str, is_there: bool, tmp_path: Path) -> None:
    """In code style in prose; one that is there is a link."""
    shutil.copytree(ROOT / "docs/_ext", tmp_path / "docs/_ext")
    shutil.copytree(ROOT / "docs/_static", tmp_path / "docs/_static")
    shutil.copy(ROOT / "docs/conf.py", tmp_path / "docs")
    api = "```{eval-rst}\n.. autoexception:: mpidp.errors.DataError\n```\n"
    (tmp_path / "docs/index.md").write_text(f"# Page\n\nCall `{name}()`.\n\n{api}")
    done = build(tmp_path / "docs", tmp_path / "site")
    assert (done.returncode == 0) == is_there, done.stderr
    if is_there:
        assert "#mpidp.errors.DataError" in Page((tmp_path / "site/index.html").read_text()).links
    else:
        assert f"reference target not found: {name}" in done.stderr


LOOK = """<title>looking</title><script>
const names = %s, found = [];
async function look() {
  for (const name of names) {
    const frame = document.createElement("iframe");
    frame.width = %d; frame.height = 800;
    await new Promise(resolve => { frame.onload = resolve; frame.src = name; document.body.append(frame); });
    const page = frame.contentDocument, root = page.documentElement;
    const styles = [...page.styleSheets].filter(sheet => sheet.href).length;
    if (styles < 2 || !page.querySelector("h1") || root.scrollWidth > root.clientWidth)
      found.push([name, styles, root.scrollWidth, root.clientWidth].join(" "));
    frame.remove();
  }
  document.title = "looked at " + names.length + " pages; wrong: " + found.join(", ");
}
addEventListener("load", look);
</script><body></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no chromium here; HTML was parsed by the standard library only")
@pytest.mark.parametrize("width", [1400, 500])
def test_in_a_browser(pages: dict[Path, Page], width: int, tmp_path: Path) -> None:
    """Each page has its styles and a title, is not wider than the window, and its scripts raise no error."""
    names = sorted(path.relative_to(SITE).as_posix() for path in pages if path.name != "search.html")
    look = SITE / f"look-{width}.htm"
    look.write_text(LOOK % (names, width))
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom"]
    command += ["--enable-logging=stderr", f"--user-data-dir={tmp_path}", "--virtual-time-budget=600000", look.as_uri()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    finally:
        look.unlink()
    assert f"<title>looked at {len(names)} pages; wrong: </title>" in done.stdout, done.stdout[:3000] + done.stderr
    errors = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not errors, "\n".join(errors)
