"""`mpidp status`: how far a run is, from the files that a real run leaves, without torch or MPI."""

import json
import os
import time
from pathlib import Path

import pytest
from login_node import run_without

from mpidp.cli import main
from mpidp.errors import ConfigError
from mpidp.tools.status import SILENT_S, duration, read_run, slurm_state, status


def make_run(folder: Path, **last_start: object) -> Path:
    """A run that has made 30 of 100 steps, 10 of them in 60 s since its second start."""
    (folder / "checkpoints/step_00000020").mkdir(parents=True)
    (folder / "checkpoints/.partial-step_00000030").mkdir()
    (folder / "config.toml").write_text("")
    begun = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(time.time() - 60))
    start = {"time": begun, "ranks": 8, "nodes": 2, "slurm_job_id": None, "first_step": 20, "last_step": 100}
    (folder / "env.json").write_text(
        json.dumps([start | {"first_step": 0, "end": "stopped by SIGTERM"}, start | last_start])
    )
    lines = [{"kind": "train", "step": 20, "loss": 2.0}, {"kind": "train", "step": 30, "loss": 1.5}]
    text = "\n".join(json.dumps(line) for line in [*lines, {"kind": "validation", "step": 30, "loss": 1.0}])
    (folder / "metrics.jsonl").write_text(text + '\n{"kind": "tr')
    return folder


def test_a_running_run(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run"))
    assert (run.state, run.step, run.last_step, run.loss, run.starts) == ("running", 30, 100, 1.5, 2)
    assert run.checkpoint == "step_00000020"
    assert run.left_s == pytest.approx(60 / 10 * 70, rel=0.2)
    text = status(tmp_path / "run")
    for part in (
        "30 of 100, loss 1.5000",
        "8 ranks on 2 nodes",
        "restarts:   1",
        "not started by Slurm",
        "step_00000020",
    ):
        assert part in text


def test_a_run_that_ended_and_one_that_fell_silent(tmp_path: Path) -> None:
    make_run(tmp_path / "runs/ended", end="done")
    silent = make_run(tmp_path / "runs/silent")
    before = time.time() - 2 * SILENT_S
    for file in ("metrics.jsonl", "env.json"):
        os.utime(silent / file, (before, before))
    lines = status(tmp_path / "runs").splitlines()
    assert lines[0].split()[:4] == ["run", "state", "step", "loss"]
    assert lines[1].startswith("ended ") and " done " in lines[1]
    assert lines[2].startswith("silent ") and "died without a record of its end" in lines[2]


def test_a_run_before_its_first_step(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", first_step=0)
    (folder / "metrics.jsonl").unlink()
    (folder / "checkpoints/step_00000020").rmdir()
    run = read_run(folder)
    assert (run.step, run.loss, run.left_s, run.checkpoint) == (0, None, None, "")
    assert "none yet" in status(folder)


def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["status"]) == 2
    assert "runs holds no runs" in capsys.readouterr().err
    assert main(["status", "a", "b"]) == 2
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match="run holds no runs"):
        status(tmp_path / "run")


@pytest.mark.parametrize("damage", ["", "[", "{}", "[]", "[7]", None])
def test_a_damaged_record_is_named(tmp_path: Path, damage: str | None) -> None:
    """Behaviour 54: of that run, and the others are shown as ever."""
    make_run(tmp_path / "sound")
    run = make_run(tmp_path / "run")
    if damage is None:
        (run / "env.json").unlink()
    else:
        (run / "env.json").write_text(damage)
    for text in (status(run), status(tmp_path)):
        assert f"{run / 'env.json'} is " in text
        assert "30" in text and "step_00000020" in text
    assert "of 100" in status(tmp_path)
    (run / "metrics.jsonl").write_text('{"kind": "train", "step": "x"}\n[]\n\x00\x00')
    assert "step:       -" in status(run)


@pytest.mark.job
def test_a_login_node_needs_neither_torch_nor_mpi(tmp_path: Path) -> None:
    """Behaviour 40."""
    make_run(tmp_path / "runs/run")
    done = run_without(("torch", "mpi4py", "h5py", "numpy"), "status", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "30 of 100" in done.stdout


def test_without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert slurm_state("7") == "there is no squeue here"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (61, "1 min 1 s"), (7500, "2 h 5 min"), (180000, "2 d 2 h"), (-3, "0 s")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
