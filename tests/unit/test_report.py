"""`mpidp report`: pages of real runs, read back: their numbers, curves, gaps and marks; and what it refuses."""

import contextlib
import copy
import dataclasses
import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_runs import records, small_run

from mpidp.cli import main
from mpidp.errors import ConfigError
from mpidp.tools.report.curves import _columns, events, gaps, panels, phases_of
from mpidp.tools.report.report import labels, report
from mpidp.tools.report.run import _covered_us, read, read_trace
from mpidp.tools.report.tables import facts, numbers
from mpidp.tools.status import status

SVG = "{http://www.w3.org/2000/svg}"
VOID = {"meta", "link", "br", "img", "hr"}
# Nothing but numpy and matplotlib may be met on a login node.
FORBID = """
import sys

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {forbidden}:
            raise ModuleNotFoundError(f"this login node has no {{name}}")

sys.meta_path.insert(0, Forbid())
from mpidp.cli import main
sys.exit(main(sys.argv[1:]))
"""


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


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped and went on: 15 steps of 10 samples in 2 starts."""
    folder = tmp_path_factory.mktemp("made")
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


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of it, to change."""
    return Path(shutil.copytree(made, tmp_path / "run", symlinks=True))


def edit(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change each record of a run."""
    changed = records(run)
    for record in changed:
        change(record)
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in changed))


def test_every_number_is_that_of_the_metrics(run: Path) -> None:
    page, html = page_of(run)
    trained, evaluated = records(run, "train"), records(run, "validation")
    for name, lines, key, style, factor in [
        ("loss: training", trained, "loss", ".5g", 1),
        ("loss: held out", evaluated, "loss", ".5g", 1),
        ("accuracy (%): training", trained, "accuracy", ".2f", 100),
        ("accuracy (%): held out", evaluated, "accuracy", ".2f", 100),
        ("learning rate: first parameter group", trained, "lr", ".5g", 1),
        ("samples/s, all ranks: training", trained, "samples_per_s", ",.1f", 1),
    ]:
        points = [(line["step"], factor * line[key]) for line in lines]
        least, greatest = (choose(points, key=lambda point: point[1]) for choose in (min, max))
        wanted = [f"{value:{style}} at step {step}" for step, value in (points[0], points[-1], least, greatest)]
        assert page.row("The curves in numbers", name) == wanted
    peak = trained[-1]["memory_bytes"]["host"] / 2**30
    assert page.row("The curves in numbers", "peak so far (GiB): host")[1] == f"{peak:.3f} at step 15"
    all_s = math.fsum(value for line in trained for value in line["seconds"].values())
    for phase in ("data", "forward", "backward", "reduce", "optimizer"):
        total_s = math.fsum(line["seconds"][phase] for line in trained)
        wanted = [f"{total_s:,.3f}", f"{100 * total_s / all_s:.1f}", f"{1e3 * total_s / 15:,.3f}"]
        assert page.row("Time of rank 0 by phase", phase) == wanted
    assert page.row("Time of rank 0 by phase", "all phases")[:2] == [f"{all_s:,.3f}", "100.0"]
    assert "NaN" not in html


def test_every_curve_is_drawn_through_its_records(run: Path) -> None:
    _, html = page_of(run)
    drawn = drawings(html)
    for title, kind, number, key in [
        ("Loss", "train", 0, "loss"),
        ("Loss", "validation", 1, "loss"),
        ("Accuracy", "train", 0, "accuracy"),
        ("Learning rate", "train", 0, "lr"),
        ("Speed", "train", 0, "samples_per_s"),
    ]:
        (points,) = curve(drawn[f"{title} over optimizer steps"], number=number)
        assert_drawn(points, [(line["step"], line[key]) for line in records(run, kind)])


def test_what_was_run(run: Path) -> None:
    page, _ = page_of(run)
    starts = json.loads((run / "env.json").read_text())
    for name, wanted in [
        ("model", "small_runs:small_net"),
        ("optimizer", "AdamW, lr = 0.01"),
        ("schedule", "StepLR, step_size = 2"),
        ("held-out data", "0.2 of the training samples"),
        ("samples of a step, all ranks", "10"),
        ("steps done", "15 of 15"),
        ("samples trained on", str(sum(line["samples"] for line in records(run, "train")))),
        ("ranks", "1"),
        ("starts", "2 (1 restart)"),
        ("end", "done"),
        ("torch", starts[0]["packages"]["torch"]),
        ("MPI", starts[0]["mpi"]),
    ]:
        assert page.row("What was run", name) == [wanted]
    assert [row[0] for row in page.tables["Starts"][1:]] == ["1", "2"]
    assert page.row("Starts", "2")[1] == "10"
    assert page.tables["Restarts and lost ranks"][1] == [
        "10",
        "restart",
        "started again on 1 rank, 1 node; before: done",
    ]
    saved = page.tables["Checkpoints"][1:]
    assert [row[:2] for row in saved] == [["step_00000005", "5"], ["step_00000010", "10"], ["step_00000015", "15"]]
    manifest = json.loads((run / "checkpoints/step_00000015/manifest.json").read_text())
    num_bytes = sum(file["num_bytes"] for file in manifest["files"])
    assert saved[2][2].startswith(f"{num_bytes:,} bytes")
    assert saved[2][3] == manifest["saved_at"]
    assert (run / "config.toml").read_text() in page.text


def test_the_page_needs_nothing_else_and_can_be_read_aloud(run: Path) -> None:
    page, html = page_of(run)
    assert all(link.startswith("#") for link in page.links)
    assert set(re.findall(r"\w+://[\w./]*", html)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not page.tags & {"script", "link", "img", "iframe", "object", "metadata"}
    assert len(page.ids) == len(set(page.ids)), "identifiers of one drawing are not those of another"
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert set(re.findall(r"url\(#([^)]*)\)", html)) <= set(page.ids)
    drawn = drawings(html)
    assert len(drawn) == 6
    for title, drawing in drawn.items():
        assert drawing.get("role") == "img"
        assert title
        assert re.search(r"\d", str(drawing.findtext(f"{SVG}desc")))
    words = {text.text for text in drawn["Loss over optimizer steps"].iter(f"{SVG}text")}
    assert {"optimizer steps", "training", "held out", "restart"} <= words


def test_a_loss_that_is_not_finite_is_a_gap(run: Path) -> None:
    def change(record: dict[str, Any]) -> None:
        if record["kind"] == "train" and record["step"] in (6, 8, 12):
            record["loss"] = None

    edit(run, change)
    page, html = page_of(run)
    pieces = curve(drawings(html)["Loss over optimizer steps"])
    steps = [line["step"] for line in records(run, "train")]
    assert steps == [2, 4, 5, 6, 8, 10, 12, 14, 15]
    assert [len(piece) for piece in pieces if len(piece) > 1] == [3, 2]
    assert "loss of 3 of 9 records of kind train was not finite (NaN or infinite), first at step 6" in page.text
    assert page.row("The curves in numbers", "loss: training")[0].endswith("at step 2")
    edit(run, lambda record: record.update(loss=None))
    changed = read(run, "run")
    assert numbers(panels([changed]), [changed]).rows[0] == ("loss: training", "run", *["none finite"] * 4)


def test_a_run_whose_loss_became_nan(tmp_path: Path) -> None:
    """Behaviour 22: a real one, not one that was edited."""
    run = small_run(tmp_path, optimizer__name="SGD", optimizer__lr=1e30, reduce__check_finite=False)
    assert records(run, "train")[-1]["loss"] is None
    assert any("was not finite" in note for note in gaps(read(run, "run")))
    assert "the curve has gaps there" in page_of(run)[0].text


def test_lost_ranks_are_marked(run: Path) -> None:
    lost = {"lost": [{"rank": 2, "host": "node7"}], "ranks": 3, "lost_s": 0.25}
    with open(run / "metrics.jsonl", "a") as file:
        for record in (
            {"kind": "loss_of_ranks", "step": 16, "epoch": 3, **lost},
            {"kind": "train", "step": 18, "epoch": 3, "samples": 20, "loss": 1.0, "seconds": {"forward": 0.5}},
        ):
            file.write(json.dumps(record) + "\n")
    page, html = page_of(run)
    assert page.tables["Restarts and lost ranks"][2] == [
        "16",
        "ranks lost",
        "lost rank 2 (node7); 3 ranks went on after 0.25 s",
    ]
    words = {text.text for text in drawings(html)["Loss over optimizer steps"].iter(f"{SVG}text")}
    assert {"restart", "ranks lost"} <= words
    found = phases_of(read(run, "run"))
    assert found is not None
    assert found.edges[-3:] == [15, 16, 18], "of the step before the loss nothing is recorded"
    assert math.isnan(found.means_ms[-2][0])
    assert found.means_ms[-1] == [0, 250, 0, 0, 0]
    assert found.num_steps == 17


def test_runs_side_by_side(made: Path, tmp_path: Path) -> None:
    other = small_run(tmp_path, optimizer__lr=0.03, model__name="small_runs:small_net", train__epochs=2)
    output = tmp_path / "both.html"
    page, html = page_of(made, other, output=output)
    assert not (made / "report.html").exists()
    names = [str(made), str(other)]  # the folders have the same name, so they are told apart by their paths
    assert page.tables["What was run"][0] == ["", *names]
    different = {row[0]: row[1:] for row in page.tables["Settings that differ"][1:]}
    assert different["optimizer.lr"] == ["0.01", "0.03"]
    assert different["scheduler.arguments.step_size"] == ["2", "not set"]
    assert "data.global_batch" not in different
    drawing = drawings(html)["Loss over optimizer steps"]
    wanted = [(line["step"], line["loss"]) for run in (made, other) for line in records(run, "train")]
    (first,), (second,) = curve(drawing, run=0), curve(drawing, run=1)
    assert_drawn(first + second, wanted)
    words = {text.text for text in drawing.iter(f"{SVG}text")}
    assert {f"{name}, {what}" for name in names for what in ("training", "held out")} <= words
    rows = [row for row in page.tables["Time of rank 0 by phase"] if row[0] == "forward"]
    assert [row[1] for row in rows] == names


def test_the_half_line_of_a_running_run_is_left_out(run: Path) -> None:
    before = page_of(run)[0].tables["The curves in numbers"]
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 16, "loss": 0.')
    page, _ = page_of(run)
    assert "the last line of metrics.jsonl is only half written" in page.text
    assert page.tables["The curves in numbers"] == before


def damage(run: Path) -> None:
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text.replace('"kind": "validation"', '"kind": ', 1))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (shutil.rmtree, "there is no such folder. Give the folder of a run"),
        (lambda run: [(run / "env.json").unlink(), shutil.rmtree(run / "checkpoints")], "is not the folder of a run"),
        (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl cannot be read (No such file or directory)"),
        (lambda run: (run / "metrics.jsonl").write_text(""), "metrics.jsonl holds no record of training yet"),
        (lambda run: (run / "metrics.jsonl").write_text('{"kind": "tr'), "holds no record of training yet"),
        (lambda run: (run / "report.html").write_text("mine"), "exists and is no report; it is not overwritten"),
        (lambda run: (run / "report.html").mkdir(), "cannot be written: Is a directory. Give another place"),
    ],
    ids=[
        "no folder",
        "no run",
        "no metrics",
        "empty",
        "half a line",
        "not a report",
        "a folder",
    ],
)
def test_what_cannot_be_reported_ends_with_2(
    run: Path, change: Callable[[Path], object], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(run)
    assert main(["report", str(run)]) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda run: (run / "env.json").write_text(""), "env.json is damaged, or cannot be read"),
        (lambda run: (run / "env.json").write_text("[]"), "env.json is damaged (it is no list of starts)"),
        (lambda run: (run / "env.json").unlink(), "env.json is missing"),
        (damage, "metrics.jsonl, line 4 is damaged and left out"),
        (lambda run: (run / "config.toml").write_text("[run"), "config.toml cannot be read"),
        (lambda run: (run / "trace.json").write_text("{"), "trace.json is left out"),
    ],
)
def test_a_damaged_record_is_named_and_the_others_are_shown(
    run: Path, change: Callable[[Path], object], expected: str
) -> None:
    """Behaviour 54: no damaged record keeps anybody from the others."""
    change(run)
    page, _ = page_of(run)
    assert expected in page.text
    assert page.row("The curves in numbers", "loss: training")


def test_words_and_places(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report"]) == 2
    assert "takes the folder of a run" in capsys.readouterr().err
    assert main(["report", str(run), f"{run}/."]) == 2
    assert "is given twice" in capsys.readouterr().err
    assert main(["report", str(run), "--output", str(tmp_path / "none/page.html")]) == 2
    assert "cannot be written: No such file or directory. Give another place: --output" in capsys.readouterr().err
    assert main(["report", str(run)]) == 0
    assert main(["report", str(run)]) == 0, "an older report is overwritten"
    assert f"{run / 'report.html'}: run to step 15" in capsys.readouterr().out
    assert [path.name for path in run.iterdir() if "partial" in path.name] == []


def test_names_are_text_and_nothing_else(run: Path, made: Path) -> None:
    named = run.rename(run.with_name("_<b>$x_1$&amp;"))
    (named / "config.toml").write_text(f'{(named / "config.toml").read_text()}\n[extra]\nname = "</pre><script>"\n')
    page, html = page_of(named, made)
    assert "./_<b>$x_1$&amp;" in page.text
    words = {text.text for text in drawings(html)["Speed over optimizer steps"].iter(f"{SVG}text")}
    assert {"./_<b>$x_1$&amp;", made.name} <= words
    assert not page.tags & {"b", "script"}
    assert labels([Path("a/x"), Path("b/x"), Path("b/y\t")]) == ["a/x", "b/x", "b/y?"]


HOSTILE = "</text></pre><script>alert(1)</script>&\x1b[2J\udcff"


def leaves(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places of all values in nested JSON, of the first two items of a list."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    return [place, *(leaf for key, item in items for leaf in leaves(item, (*place, key)))]


def put(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """The nested JSON with another value at a place."""
    if not place:
        return new
    changed = copy.copy(value)
    changed[place[0]] = put(value[place[0]], place[1:], new)
    return changed


def test_no_text_of_a_run_folder_becomes_markup(run: Path) -> None:
    """Behaviour 56."""
    starts = json.loads((run / "env.json").read_text())
    for place in leaves(starts):
        if isinstance(functools.reduce(lambda value, key: value[key], place, starts), str) and "time" not in place:
            starts = put(starts, place, HOSTILE)
    (run / "env.json").write_text(json.dumps(put(starts, (0, "packages"), {HOSTILE: HOSTILE})))
    lines = [json.dumps(record | {"seconds": {HOSTILE: 1.0, "data": 2.0}}) for record in records(run)]
    lost = {"kind": "loss_of_ranks", "step": 15, "lost": [{"rank": HOSTILE, "host": HOSTILE}], "ranks": 1}
    (run / "metrics.jsonl").write_text("\n".join([*lines, json.dumps(lost)]) + "\n")
    with open(run / "config.toml", "a") as file:
        file.write(f"\n[extra]\nname = {json.dumps(HOSTILE[:-5])}\n")
    page, html = page_of(run)
    assert page.text.count("<script>alert(1)</script>") > 10
    assert "script" not in page.tags and all(link.startswith("#") for link in page.links)
    assert drawings(html), "each is well-formed XML"


OTHERS = [HOSTILE, None, True, -1, 10**400, 2**62, 1e308, [], {}, [1, "a"], {"a": {}}]


@given(st.integers(0, 2**32), st.sampled_from(OTHERS))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_values_of_other_kinds_are_left_out_or_refused(run: Path, choice: int, new: Any) -> None:
    """One value in a record of a foreign run is of another kind; drawing is left out here, as it takes long."""
    file = run / ("env.json", "metrics.jsonl")[choice % 2]
    before = file.read_text()
    is_lines = file.suffix == ".jsonl"
    content = [json.loads(line) for line in before.splitlines()] if is_lines else json.loads(before)
    places = leaves(content)[1:]
    changed = put(content, places[choice % len(places)], new)
    file.write_text("".join(f"{json.dumps(record)}\n" for record in changed) if is_lines else json.dumps(changed))
    with pytest.MonkeyPatch.context() as patch:
        for drawn in ("draw_panel", "draw_phases", "to_svg"):
            patch.setattr(f"mpidp.tools.report.page.{drawn}", lambda *_: "")
        for ask in (lambda: report([run], None), lambda: status(run)):
            with contextlib.suppress(ConfigError):
                ask()
    file.write_text(before)


@pytest.mark.parametrize("name", ["env.json", "metrics.jsonl", "trace.json", "config.toml"])
def test_deep_nesting_is_damage(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (run / name).write_text("a = " * (name == "config.toml") + "[" * 100_000 + "\n")
    code = main(["report", str(run)])
    assert (code, capsys.readouterr().err.count("\n")) == ((2, 1) if name == "metrics.jsonl" else (0, 0))


def test_a_link_of_the_unfinished_page_is_not_followed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    (run / f".report.html.{os.getpid()}.partial").symlink_to(tmp_path / "mine")
    page_of(run)
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_damaged_checkpoint_is_named(run: Path) -> None:
    (run / "checkpoints/step_00000005/manifest.json").write_text("{")
    page, _ = page_of(run)
    assert page.tables["Checkpoints"][1][0] == "step_00000005"
    assert "manifest.json cannot be read" in page.tables["Checkpoints"][1][-1]
    assert page.tables["Checkpoints"][2][-1] == ""


def test_how_starts_ended(run: Path) -> None:
    starts = json.loads((run / "env.json").read_text())
    for start in starts:
        del start["end"]
    (run / "env.json").write_text(json.dumps(starts))
    found = read(run, "run")
    assert found.end(0) == "without a word: killed, or aborted"
    assert found.end(1) == "still running"
    assert "silent" in dataclasses.replace(found, silent_s=1e6).end(1)
    (run / "env.json").write_text(json.dumps([{"hosts": [f"node{number:03}" for number in range(200)]}]))
    assert ["hosts", "node000, node001, node002, ... 196 more ..., node199"] in map(
        list, facts([read(run, "run")]).rows
    )
    (run / "env.json").write_text("[{}]")
    unknown = {row[0]: row[1] for row in facts([read(run, "run")]).rows}
    assert (unknown["ranks"], unknown["hosts"], unknown["first start"]) == ("not recorded",) * 3


def test_the_ranks_of_a_trace(run: Path) -> None:
    """Waits lie within phases; rank 1 computes for longer, and rank 0 waits for it."""
    spans = []
    for rank, forward_us in ((0, 1000), (1, 3000)):
        for number in range(2):
            start = 10_000 * number
            for thread, name, kind, start_us, length_us in (
                (0, f"step {number}", "step", 0, 5600),
                (0, "forward", "phase", 0, forward_us),
                (0, "reduce", "phase", forward_us, 5000 - forward_us),
                (0, "allreduce", "wait", forward_us, 4000 - forward_us),
                (1, "a request", "wait", 0, 5000),  # of a helper thread, while the other one computes
                (0, "optimizer", "phase", 5000, 500),
                (0, "evaluate", "phase", 5600, 900),  # between steps
            ):
                times = {"ts": start + start_us, "dur": length_us}
                spans.append({"ph": "X", "pid": rank, "tid": thread, "name": name, "cat": kind, **times})
    others = [{"ph": "M", "pid": 0}, {"ph": "X", "cat": "phase"}, {"ph": "X", "cat": "work", "ts": 0, "dur": 9}, 3]
    (run / "trace.json").write_text(json.dumps({"traceEvents": spans + others, "otherData": {}}))
    page, _ = page_of(run)
    (caption,) = [caption for caption in page.tables if "from trace.json" in caption]
    assert "Rank 1 is the slowest by itself: 3.500 ms a step" in caption
    assert page.tables[caption] == [
        ["rank", "steps traced", "forward", "reduce", "optimizer", "waiting for ranks", "by itself"],
        ["0", "2", "1.000", "4.000", "0.500", "3.000", "1.500"],
        ["1", "2", "3.000", "2.000", "0.500", "1.000", "3.500"],
    ]


def test_the_trace_of_a_real_run(run: Path) -> None:
    (rank,) = read_trace(run / "trace.json").ranks  # type: ignore[union-attr]
    events = [event for event in json.loads((run / "trace.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert rank.steps == 3
    for phase in ("data", "forward", "backward", "optimizer"):
        lengths_us = [event["dur"] for event in events if event["name"] == phase and event["cat"] == "phase"]
        assert rank.phases_s[phase] == pytest.approx(sum(lengths_us) / 1e6)
    steps_s = sum(event["dur"] for event in events if event["cat"] == "step") / 1e6
    assert 0 < rank.own_s < steps_s


def test_a_trace_without_steps(run: Path) -> None:
    events = [
        {"ph": "X", "cat": "phase", "name": name, "ts": start, "dur": 100, "pid": 5}
        for start, name in ((0, "forward"), (100, "optimizer"), (200, "forward"), (300, "optimizer"), (400, "forward"))
    ]
    (run / "trace.json").write_text(json.dumps({"traceEvents": events}))
    (rank,) = read_trace(run / "trace.json").ranks  # type: ignore[union-attr]
    assert (rank.rank, rank.steps, rank.waiting_s, rank.own_s) == (5, 2, 0, pytest.approx(500e-6))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"traceEvents": null}', '{"traceEvents": [{"ph": "X"}]}'])
def test_a_trace_that_cannot_be_used_is_said(run: Path, text: str) -> None:
    (run / "trace.json").write_text(text)
    (note,) = gaps(read(run, "run"))
    assert "trace.json is left out: it " in note
    assert read_trace(run / "none.json") is None


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12))
def test_time_that_spans_cover(spans: list[tuple[int, int]]) -> None:
    covered = {moment for start, length in spans for moment in range(start, start + length)}
    assert _covered_us([{"ts": start, "dur": length} for start, length in spans]) == len(covered)


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0, 10)), min_size=1, max_size=2000))
def test_columns_of_a_long_run_keep_its_seconds(intervals: list[tuple[int, float]]) -> None:
    steps, recorded = 0, []
    for length, seconds in intervals:
        recorded.append((steps, steps + length, {"forward": seconds}))
        steps += length
    columns = _columns(recorded, ("forward",))
    assert len(columns) <= 400
    total_ms = math.fsum((last - first) * means[0] for first, last, means in columns)
    assert total_ms == pytest.approx(1e3 * math.fsum(seconds for _, seconds in intervals))


def test_a_long_run_makes_a_page_of_bearable_size(run: Path) -> None:
    line = records(run, "train")[0]
    with open(run / "metrics.jsonl", "w") as file:
        for number in range(1, 20_001):
            seconds = {"forward": 1.0 if number == 7 else 0.01}
            values = {"step": number, "loss": 2 + math.sin(number**2), "seconds": seconds}
            file.write(json.dumps(line | values) + "\n")
    _, html = page_of(run)
    assert len(html) < 4_000_000
    assert "1 slower columns are cut off" not in html, "it lies in a column with 49 others"
    (points, *_) = curve(drawings(html)["Loss over optimizer steps"])
    assert len(points) > 1000


def test_a_slow_interval_does_not_hide_the_others(run: Path) -> None:
    def change(record: dict[str, Any]) -> None:
        if record["kind"] == "train":
            record["seconds"] = {"forward": 9.0 if record["step"] == 2 else 0.01}

    edit(run, change)
    assert "1 slower column is cut off at the top" in page_of(run)[0].text
    found = phases_of(read(run, "run"))
    assert found is not None
    assert found.ceiling_ms == pytest.approx(4 * 1e3 * 0.01 / 2)


def test_records_without_some_fields(run: Path) -> None:
    edit(run, lambda record: [record.pop(key, None) for key in ("accuracy", "seconds", "memory_bytes", "lr")])
    _, html = page_of(run)
    assert list(drawings(html)) == ["Loss over optimizer steps", "Speed over optimizer steps"]
    assert [panel.title for panel in panels([read(run, "run")])] == ["Loss", "Speed"]
    assert [event.kind for event in events(read(run, "run"))] == ["restart"]


@pytest.mark.parametrize("words", [["report", "--help"], ["report", "run", "--output=page.html"]])
def test_a_login_node_needs_neither_torch_nor_mpi(run: Path, words: list[str]) -> None:
    """Behaviour 40."""
    code = FORBID.format(forbidden=("torch", "mpi4py", "h5py"))
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=run.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert (run.parent / "page.html").exists() == ("run" in words)


def test_without_matplotlib_it_says_what_to_install(run: Path) -> None:
    code = FORBID.format(forbidden=("matplotlib",))
    words = [sys.executable, "-c", code, "report", "run"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=run.parent)
    assert done.returncode == 2
    assert done.stderr.startswith("mpidp: error: mpidp report draws with a package: pip install 'mpidp[report]'")
    assert done.stderr.count("\n") == 1
    assert not (run / "report.html").exists()


def test_only_one_process_of_a_job_writes(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mpidp.world.current._world", None)  # another test may have started MPI here
    monkeypatch.setenv("PMI_RANK", "1")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr() == ("", "")
    assert not (run / "report.html").exists()
