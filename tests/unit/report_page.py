"""Pages of `mpidp report` read back: their tables, drawings and curves; and the run that they are about."""

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from small_runs import small_run

from mpidp.tools.report.report import report

SVG = "{http://www.w3.org/2000/svg}"
VOID = {"meta", "link", "br", "img", "hr"}


class Page(HTMLParser):
    """Tables of a page by their caption, its text, and whether every element is closed where it should be."""

    def __init__(self, html: str):
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.rows: list[list[str]] = []
        self.text, self.caption = "", ""
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [str(value) for key, value in attrs if key in ("src", "href", "xlink:href", "action", "data")]
        self.ids += [str(value) for key, value in attrs if key == "id"]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.rows, self.caption = [], ""
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "table":
            self.tables[self.caption] = self.rows

    def handle_data(self, data: str) -> None:
        self.text += data
        if "caption" in self.open:
            self.caption += data
        elif self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    def row(self, caption: str, name: str) -> list[str]:
        """The cells after the name of the one row that has it."""
        (found,) = [cells[1:] for cells in self.tables[caption] if cells[0] == name]
        return found


def page_of(*runs: Path, output: Path | None = None) -> tuple[Page, str]:
    report(runs, output)
    html = (output or runs[0] / "report.html").read_text()
    return Page(html), html


def drawings(html: str) -> dict[str, ElementTree.Element]:
    """The drawings of a page, each of which is XML by itself, by their titles."""
    found = [ElementTree.fromstring(text) for text in re.findall(r"<svg .*?</svg>", html, flags=re.DOTALL)]
    return {str(drawing.findtext(f"{SVG}title")): drawing for drawing in found}


def curve(drawing: ElementTree.Element, run: int = 0, number: int = 0) -> list[list[tuple[float, float]]]:
    """The points of a curve in the drawing's units, in pieces between gaps."""
    (group,) = [group for group in drawing.iter(f"{SVG}g") if group.get("id", "").endswith(f"curve-{run}-{number}")]
    data = group.find(f"{SVG}path").get("d")  # type: ignore[union-attr]
    pieces = [piece for piece in data.split("M") if piece.strip()]  # type: ignore[union-attr]
    return [[tuple(map(float, point.split())) for point in piece.split("L")] for piece in pieces]  # type: ignore[misc]


def assert_drawn(points: list[tuple[float, float]], wanted: list[tuple[float, float]]) -> None:
    """Both axes are straight: what is drawn is what was recorded but for a factor and an offset of each axis."""
    assert len(points) == len(wanted)
    for axis in (0, 1):
        drawn, recorded = ([point[axis] for point in points] for points in (points, wanted))
        low, high = (recorded.index(choose(recorded)) for choose in (min, max))
        if recorded[high] == recorded[low]:
            assert len(set(drawn)) == 1
            continue
        factor = (drawn[high] - drawn[low]) / (recorded[high] - recorded[low])
        assert factor > 0 if axis == 0 else factor < 0, "steps to the right, values upwards"
        for place, value in zip(drawn, recorded, strict=True):
            assert place == pytest.approx(drawn[low] + factor * (value - recorded[low]), abs=0.01)


def words_of(drawing: ElementTree.Element) -> set[str | None]:
    """The texts in a drawing."""
    return {text.text for text in drawing.iter(f"{SVG}text")}


def stopped_run(folder: Path) -> Path:
    """A run that was stopped and went on: 15 steps of 10 samples in 2 starts."""
    settings: dict[str, Any] = {
        "train__epochs": 3,
        "scheduler__name": "StepLR",
        "scheduler__arguments": {"step_size": 2},
        "log__trace_steps": 3,
        "log__trace_from": 1,
    }
    run = small_run(folder, **settings)
    shutil.rmtree(run / "checkpoints/step_00000015")
    return small_run(folder, resume=run, **settings)
