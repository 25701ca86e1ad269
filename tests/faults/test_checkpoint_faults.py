"""Checkpoints on file systems that fail, and of jobs that are killed while saving: real mounts, processes, signals."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_job import check
from test_resume import train_and_kill
from tiny import make_workplace

from jobs import ROOT, Result, run_job
from mpidp.train.checkpoint.read import load, newest, newest_first

pytestmark = pytest.mark.timeout(300)  # several jobs a test, each with a limit of its own
TIMEOUT_S = 60.0
JOB = Path(__file__).with_name("checkpoint_job.py")
NUM_BYTES = 400_000


def mount(folder: Path, options: str) -> None:
    """Mount a small file system in memory, or skip the test where that is not allowed."""
    words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True) if os.geteuid() == 0 else None
    if done is None or done.returncode != 0:
        pytest.skip("mounting file systems needs root" if done is None else f"cannot mount: {done.stderr}")


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A folder to mount something on."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    yield folder
    if folder.is_mount():
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def save(folder: Path, saves: int, *words: str, ranks: int = 2, **environment: str) -> Result:
    return run_job([JOB, folder, str(saves), *words], ranks, TIMEOUT_S, cwd=ROOT, environment=environment)


FULL = {
    "full": ("size=1m", "no space is left on its file system (ENOSPC; "),
    "no more files": ("size=20m,nr_inodes=14", "no space is left on its file system (ENOSPC; "),
}


@pytest.mark.parametrize(("how", "on_failure"), [("full", "stop"), ("no more files", "warn")])
def test_a_full_file_system(mounted: Path, how: str, on_failure: str) -> None:
    """The reason is told once, the checkpoint before stays, and training stops or goes on as was chosen."""
    options, words = FULL[how]
    mount(mounted, options)
    result = save(mounted, 8, "--keep=9", f"--on-failure={on_failure}")
    path, passed_over = newest(mounted)
    step = check(path, NUM_BYTES)
    assert 1 <= step < 8 and not passed_over
    assert words in result.output and "Make room" in result.output
    assert f"{path.name} stays the newest" in result.output
    assert not list(mounted.glob(".partial-*")), "what was written of it makes room again"
    if on_failure == "stop":
        assert result.code == 1 and result.output.count(words) == 1
    else:
        assert result.code == 0, result.output
        assert "Training goes on without it" in result.output
    subprocess.run(["mount", "-o", "remount,size=40m,nr_inodes=9999", str(mounted)], check=True)
    again = save(mounted, 1)
    assert again.code == 0 and f"resumed {step}" in again.stdout, again.output


def test_a_file_system_that_became_read_only(mounted: Path) -> None:
    mount(mounted, "size=9m")
    assert save(mounted, 2).code == 0
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    result = save(mounted, 1)
    assert result.code == 1
    assert "resumed 2" in result.stdout and "its file system is read-only (EROFS)" in result.output
    assert check(newest(mounted)[0], NUM_BYTES) == 2


@pytest.mark.parametrize(("rank", "file", "limit"), [(0, "state.pt", 100_000), (1, "rank_00001.pt", 3000)])
def test_a_limit_on_the_size_of_files_of_one_rank(tmp_path: Path, rank: int, file: str, limit: int) -> None:
    """Behaviour 44: the failure of one rank is told once, with the rank, and ends all."""
    assert save(tmp_path, 2).code == 0
    result = save(tmp_path, 1, LIMIT_RANK=str(rank), LIMIT_BYTES=str(limit))
    assert result.code == 1
    assert result.output.count("(EFBIG)") == 1, result.output
    assert f"{file} cannot be written" in result.output and f"on rank {rank} of 2" in result.output
    assert check(newest(tmp_path)[0], NUM_BYTES) == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_that_sees_an_old_state_of_the_file_system(tmp_path: Path, rank: int) -> None:
    """Behaviour 41: one rank cannot read the newest, so all go on from the one before, and say why."""
    if os.geteuid() != 0:
        pytest.skip("a view of its own needs root")
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    assert save(folder, 4).code == 0
    stale = Path(shutil.copytree(folder, tmp_path / "stale", symlinks=True))
    os.truncate(stale / "step_00000004" / "state.pt", 1000)
    view = {"VIEW_RANK": str(rank), "VIEW_FROM": str(stale), "VIEW_AT": str(folder)}
    result = save(folder, 0, **view)
    assert result.code == 0, result.output
    assert "resumed 3" in result.stdout


def test_a_folder_that_nodes_do_not_share(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("a view of its own needs root")
    for name in ("checkpoints", "elsewhere"):
        (tmp_path / name).mkdir()
    view = {"VIEW_RANK": "1", "VIEW_FROM": str(tmp_path / "elsewhere"), "VIEW_AT": str(tmp_path / "checkpoints")}
    result = save(tmp_path / "checkpoints", 1, **view)
    assert result.code == 1
    assert "rank_00001.pt is not there, seen from rank 0" in result.output and "all nodes share" in result.output
    assert newest_first(tmp_path / "checkpoints") == []


def test_kills_and_damage_at_random_points() -> None:
    """Behaviours 41, 42; `--points 300` is the long set."""
    words = [sys.executable, Path(__file__).with_name("chaos_checkpoint.py"), "--points=6", "--flips=50", "--seed=7"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "50 flips and truncations, 50 found and named" in done.stdout


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    return make_workplace(tmp_path)


def train(folder: Path, ranks: int, *words: str) -> Result:
    return run_job(["-m", "mpidp", "train", "run.toml", *words], ranks, TIMEOUT_S, cwd=folder)


def losses(folder: Path) -> list[list[Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [[record.get(key) for key in ("kind", "step", "loss")] for record in map(json.loads, lines)]


def test_the_rounding_errors_of_a_16_bit_wire_are_part_of_a_checkpoint(workplace: Path) -> None:
    """Behaviour 43: resumed at every checkpoint, in the background, the run ends with the same bits."""
    words = [
        "--reduce.comm_dtype=bf16",
        "--reduce.error_feedback=True",
        "--checkpoint.every_steps=1",
        "--checkpoint.keep=99",
    ]
    assert train(workplace, 2, *words).code == 0
    run = workplace / "runs/run"
    expected, end = losses(run), load(newest(run / "checkpoints")[0])["model"]
    for step in (5, 13):
        for path in newest_first(run / "checkpoints"):
            if int(path.name.removeprefix("step_")) > step:
                shutil.rmtree(path)
        result = train(workplace, 2, *words, "--resume=runs/run")
        assert result.code == 0 and f"step {step}," in result.output, result.output
        assert losses(run) == expected
        found = load(newest(run / "checkpoints")[0])["model"]
        assert all(torch.equal(found[name], tensor) for name, tensor in end.items())
    for path in newest_first(run / "checkpoints")[:3]:
        shutil.rmtree(path)
    result = train(workplace, 3, *words, "--resume=runs/run")
    assert result.code == 0 and result.output.count("error feedback starts from nothing") == 1, result.output


def test_killed_while_checkpoints_are_written_in_the_background(workplace: Path) -> None:
    """Behaviour 43: wherever the newest complete one is, the end is the same, bit for bit."""
    words = ["--checkpoint.every_steps=1", "--model.arguments.dropout=0.3", "--model.arguments.width=3000"]
    assert train(workplace, 2, *words, "--run.name=whole").code == 0
    train_and_kill(workplace, 2, 3, *words)
    train_and_kill(workplace, 2, 7, *words, "--resume=runs/run")
    result = train(workplace, 2, *words, "--resume=runs/run")
    assert result.code == 0, result.output
    last = workplace / "runs/run"
    assert losses(last) == losses(workplace / "runs/whole")
    whole = load(newest(workplace / "runs/whole/checkpoints")[0])["model"]
    found = load(newest(last / "checkpoints")[0])["model"]
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("on_failure", ["stop", "warn"])
def test_training_on_a_full_disk(workplace: Path, mounted: Path, on_failure: str) -> None:
    """Then with room it is resumed, and ends as if nothing had happened."""
    words = ["--checkpoint.every_steps=2", "--checkpoint.keep=99", "--model.arguments.width=4000"]
    assert train(workplace, 2, *words, "--run.name=whole").code == 0
    mount(mounted, "size=2m")
    here = [*words, f"--run.folder={mounted}", f"--checkpoint.on_failure={on_failure}"]
    result = train(workplace, 2, *here)
    assert result.code == 1, "the end of the run is not saved in either case"
    assert "no space is left on its file system" in result.output and "Traceback" not in result.output, result.output
    assert ("epoch   3/3" in result.output) == (on_failure == "warn")
    subprocess.run(["mount", "-o", "remount,size=40m", str(mounted)], check=True)
    resumed = train(workplace, 2, *here, f"--resume={mounted / 'run'}")
    assert resumed.code == 0, resumed.output
    assert losses(mounted / "run") == losses(workplace / "runs/whole")
