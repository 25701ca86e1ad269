"""`mpidp report`: the page of a real run, read back: its numbers, curves, gaps and marks."""

import dataclasses
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_page import SVG, assert_drawn, curve, drawings, page_of, stopped_run, words_of
from small_runs import records, small_run

from mpidp.tools.report.curves import _columns, events, gaps, panels, phases_of
from mpidp.tools.report.report import read
from mpidp.tools.report.tables import facts, numbers


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stopped_run(tmp_path_factory.mktemp("made"))


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
    words = words_of(drawn["Loss over optimizer steps"])
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
    words = words_of(drawings(html)["Loss over optimizer steps"])
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
    words = words_of(drawing)
    assert {f"{name}, {what}" for name in names for what in ("training", "held out")} <= words
    rows = [row for row in page.tables["Time of rank 0 by phase"] if row[0] == "forward"]
    assert [row[1] for row in rows] == names


def test_how_starts_ended(run: Path) -> None:
    starts = json.loads((run / "env.json").read_text())
    for start in starts:
        del start["end"]
    (run / "env.json").write_text(json.dumps(starts))
    found = read(run, "run")
    assert found.end(0) == "without a record of its end: killed, or aborted"
    assert found.end(1) == "still running"
    assert "silent" in dataclasses.replace(found, silent_s=1e6).end(1)
    (run / "env.json").write_text(json.dumps([{"hosts": [f"node{number:03}" for number in range(200)]}]))
    assert ["hosts", "node000, node001, node002, ... 196 more ..., node199"] in map(
        list, facts([read(run, "run")]).rows
    )
    (run / "env.json").write_text("[{}]")
    unknown = {row[0]: row[1] for row in facts([read(run, "run")]).rows}
    assert (unknown["ranks"], unknown["hosts"], unknown["first start"]) == ("not recorded",) * 3


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
