"""Loops of one's own with `mpidp.Checkpoints`: stopped or killed in an epoch's middle, and resumed on any ranks."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from jobs import ROOT, Result, finish, kill, launch, run_job
from mpidp.train.checkpoint.read import find_fault, newest_first

pytestmark = pytest.mark.timeout(300)
TIMEOUT_S = 120.0
SCRIPT = Path(__file__).with_name("own_loop_job.py")
ROWS, STEPS, EPOCHS = 84, 7, 3  # batches of 12
STOPPED_EARLY = 75


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "data.h5"
    generator = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file["x"] = generator.standard_normal((ROWS, 4)).astype(np.float32)
        file["y"] = generator.standard_normal(ROWS).astype(np.float32)
    return path


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder of a run on so many ranks that nobody interrupted."""

    @cache
    def of(ranks: int) -> Path:
        folder = tmp_path_factory.mktemp(f"whole_{ranks}")
        result = run_job([SCRIPT, data, "run"], ranks, TIMEOUT_S, cwd=folder)
        assert result.code == 0, result.output
        return folder

    return of


def interrupt(job: subprocess.Popen[str], folder: Path, number: str) -> Result:
    """Ends a job by a signal, to one rank or, SIGKILL, to all, when it is in the second epoch."""
    deadline = time.monotonic() + TIMEOUT_S
    while len(rows_of_steps(folder)) < STEPS + 2:
        if job.poll() is not None or time.monotonic() > deadline:
            kill(job)
            pytest.fail(finish(job).output)
        time.sleep(0.01)
    if number == "SIGKILL":
        kill(job)
    else:
        os.kill(rank_process(job), getattr(signal, number))
    return finish(job, TIMEOUT_S)


def rank_process(job: subprocess.Popen[str]) -> int:
    """The process of some rank: the one of the script's that is a child of the launcher's."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != job.pid:
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if str(SCRIPT).encode() in words and b"-n" not in words and _descends(int(folder.name), job.pid):
                    found.append(int(folder.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return max(found)


def _descends(process: int, ancestor: int) -> bool:
    while process > 1:
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        if process == ancestor:
            return True
    return False


def rows_of_steps(folder: Path) -> dict[int, tuple[int, list[int]]]:
    """Of each step its epoch and the rows of all ranks; of a step that was taken twice, the last time's."""
    found: dict[int, dict[str, tuple[int, list[int]]]] = {}
    for path in sorted(folder.glob("steps_*.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            found.setdefault(record["step"], {})[path.name] = record["epoch"], record["rows"]
    return {
        step: (next(iter(ranks.values()))[0], sorted(row for _, rows in ranks.values() for row in rows))
        for step, ranks in found.items()
    }


@pytest.mark.parametrize(
    ("before", "after", "number"),
    [
        pytest.param(2, 2, "SIGKILL", marks=pytest.mark.library),
        (3, 3, "SIGTERM"),
        pytest.param(3, 2, "SIGUSR2", marks=pytest.mark.library),
        (1, 2, "SIGKILL"),
    ],
)
def test_an_interrupted_loop_goes_on(
    data: Path, whole: Callable[[int], Path], tmp_path: Path, before: int, after: int, number: str
) -> None:
    """Behaviours 25, 41, 43, 45: the same batches at any number of ranks, and the same bits at the same one."""
    job = launch([SCRIPT, data, "run"], before, cwd=tmp_path, environment={"PAUSE_S": "0.05"})
    result = interrupt(job, tmp_path, number)
    begun = max(rows_of_steps(tmp_path))
    assert STEPS < begun < STEPS * EPOCHS
    newest = newest_first(tmp_path / "run")[0]
    saved = int(newest.name.removeprefix("step_"))
    assert find_fault(newest) is None
    if number == "SIGKILL":
        assert result.code != 0
    else:
        assert result.code == STOPPED_EARLY, result.output
        assert f"stopped by {number} after step {saved}" in result.output
        assert saved == begun and "Traceback" not in result.output
        assert not (tmp_path / "run/owner.json").exists()
    if before != after:  # whose records of the steps before are of other ranks
        earlier = {step: rows for step, rows in rows_of_steps(tmp_path).items() if step <= saved}
        for path in tmp_path.glob("steps_*.jsonl"):
            path.unlink()
    else:
        earlier = {}
    result = run_job([SCRIPT, data, "run"], after, TIMEOUT_S, cwd=tmp_path)
    assert result.code == 0, result.output
    assert result.output.count(f"begins at step {saved}\n") == after
    assert earlier | rows_of_steps(tmp_path) == rows_of_steps(whole(after))
    if before == after:
        ends = [torch.load(folder / "end.pt", weights_only=True) for folder in (tmp_path, whole(after))]
        assert all(torch.equal(ends[0][name], tensor) for name, tensor in ends[1].items())


@pytest.mark.library
@pytest.mark.short
def test_the_loop_of_the_jobs_goes_on_and_ends(tmp_path: Path) -> None:
    """jobs/own_loop.py: by a file STOP while it trains, and started again until it is through."""
    (tmp_path / "data").symlink_to(ROOT / "data")
    (tmp_path / "runs/own_loop").mkdir(parents=True)
    (tmp_path / "runs/own_loop/STOP").touch()
    result = run_job([ROOT / "jobs/own_loop.py"], 2, TIMEOUT_S, cwd=tmp_path)
    assert result.code == STOPPED_EARLY, result.output
    assert "stopped by the file STOP after step" in result.output
    result = run_job([ROOT / "jobs/own_loop.py"], 2, TIMEOUT_S, cwd=tmp_path)
    assert result.code == 0, result.output
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == [f"epoch {epoch}" for epoch in range(1, 6)]
    result = run_job([ROOT / "jobs/own_loop.py"], 0, TIMEOUT_S, cwd=tmp_path)
    assert result.code == 0, result.output
