"""`mpidp report` of run folders that are damaged, foreign or hostile, of traces, and on nodes without torch or MPI."""

import contextlib
import copy
import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from login_node import run_without
from report_page import drawings, page_of, stopped_run, words_of
from small_runs import records

from mpidp.cli import main
from mpidp.errors import ConfigError
from mpidp.tools.report.report import _covered_us, labels, read_trace, report
from mpidp.tools.status import status

DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stopped_run(tmp_path_factory.mktemp("made"))


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of it, to change."""
    return Path(shutil.copytree(made, tmp_path / "run", symlinks=True))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (shutil.rmtree, "there is no such folder. Give the folder of a run"),
        (lambda run: [(run / "env.json").unlink(), shutil.rmtree(run / "checkpoints")], "is not the folder of a run"),
        (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl cannot be read (No such file or directory)"),
        (lambda run: (run / "metrics.jsonl").write_text(""), "metrics.jsonl holds no record of training yet"),
        (lambda run: (run / "metrics.jsonl").write_text('{"kind": "tr'), "holds no record of training yet"),
        (lambda run: (run / "metrics.jsonl").write_text(DEEP), "holds no record of training yet"),
        (lambda run: (run / "report.html").write_text("mine"), "exists and is no report; it is not overwritten"),
        (lambda run: (run / "report.html").mkdir(), "cannot be written: Is a directory. Give another place"),
    ],
    ids=["no folder", "no run", "no metrics", "empty", "half a line", "deep", "not a report", "a folder"],
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


DAMAGES: list[tuple[dict[str, str], tuple[str, ...]]] = [
    ({"env.json": "", "trace.json": "{"}, ("env.json is damaged, or cannot be read", "trace.json is left out")),
    (
        {"env.json": "[]", "config.toml": "[run"},
        ("env.json is damaged (it is no list of starts)", "config.toml cannot be read"),
    ),
    (
        {"env.json": DEEP, "trace.json": DEEP, "config.toml": f"a = {DEEP}\n"},
        ("env.json is damaged", "trace.json is left out", "config.toml cannot be read"),
    ),
]


@pytest.mark.parametrize("files, expected", DAMAGES)
def test_damaged_files_are_named_and_the_others_are_shown(
    run: Path, files: dict[str, str], expected: tuple[str, ...]
) -> None:
    """Behaviour 54: no damaged record keeps anybody from the others."""
    for name, text in files.items():
        (run / name).write_text(text)
    page, _ = page_of(run)
    assert all(text in page.text for text in expected)
    assert page.row("The curves in numbers", "loss: training")


def test_damaged_records_are_named_and_the_others_are_shown(run: Path) -> None:
    """Behaviour 54: a line of metrics, the half line of a running job, a manifest, and no record of starts."""
    text = (run / "metrics.jsonl").read_text().replace('"kind": "validation"', '"kind": ', 1)
    (run / "metrics.jsonl").write_text(text + '{"kind": "train", "step": 16, "loss": 0.')
    (run / "checkpoints/step_00000005/manifest.json").write_text("{")
    (run / "env.json").unlink()
    page, _ = page_of(run)
    for expected in (
        "metrics.jsonl, line 4 is damaged and left out",
        "the last line of metrics.jsonl is only half written",
        "env.json is missing",
    ):
        assert expected in page.text
    assert page.row("The curves in numbers", "loss: training")[1].endswith("at step 15")
    broken, whole = page.tables["Checkpoints"][1:3]
    assert broken[0] == "step_00000005" and "manifest.json cannot be read" in broken[-1] and whole[-1] == ""


def test_words_and_places(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    words = words_of(drawings(html)["Speed over optimizer steps"])
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


def test_a_link_of_the_unfinished_page_is_not_followed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    (run / f".report.html.{os.getpid()}.partial").symlink_to(tmp_path / "mine")
    page_of(run)
    assert (tmp_path / "mine").read_text() == "precious"


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
    (rank,), _ = read_trace(run / "trace.json")
    events = [event for event in json.loads((run / "trace.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert rank.steps == 3
    for phase in ("data", "forward", "backward", "optimizer"):
        lengths_us = [event["dur"] for event in events if event["name"] == phase and event["cat"] == "phase"]
        assert rank.phases_s[phase] == pytest.approx(sum(lengths_us) / 1e6)
    steps_s = sum(event["dur"] for event in events if event["cat"] == "step") / 1e6
    assert 0 < rank.own_s < steps_s


def test_traces_of_no_use(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    assert read_trace(trace) == ([], [])
    phase = {"ph": "X", "cat": "phase", "name": "forward", "ts": 0, "dur": 100, "pid": 5}
    without_steps = json.dumps({"traceEvents": [phase]})
    for text in ("{", "[]", "{}", '{"traceEvents": null}', '{"traceEvents": [{"ph": "X"}]}', without_steps):
        trace.write_text(text)
        ranks, (fault,) = read_trace(trace)
        assert not ranks and fault.startswith("trace.json is left out: it ")


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12))
def test_time_that_spans_cover(spans: list[tuple[int, int]]) -> None:
    covered = {moment for start, length in spans for moment in range(start, start + length)}
    assert _covered_us([{"ts": start, "dur": length} for start, length in spans]) == len(covered)


@pytest.mark.job
def test_a_login_node_needs_neither_torch_nor_mpi(run: Path) -> None:
    """Behaviour 40."""
    done = run_without(("torch", "mpi4py", "h5py"), "report", "run", "--output=page.html", folder=run.parent)
    assert done.returncode == 0 and done.stdout, done.stderr
    assert (run.parent / "page.html").exists()


@pytest.mark.job
def test_without_matplotlib_it_says_what_to_install(run: Path) -> None:
    done = run_without(("matplotlib",), "report", "run", folder=run.parent)
    assert done.returncode == 2
    assert done.stderr.startswith("mpidp: error: mpidp report draws with a package: pip install matplotlib")
    assert done.stderr.count("\n") == 1
    assert not (run / "report.html").exists()


def test_only_one_process_of_a_job_writes(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mpidp.world.launch._world", None)  # another test may have started MPI here
    monkeypatch.setenv("PMI_RANK", "1")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr() == ("", "")
    assert not (run / "report.html").exists()
