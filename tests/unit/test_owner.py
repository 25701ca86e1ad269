"""Who owns a run folder: nobody, this job, one that lives, one that died here, elsewhere, or was started again."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from small_runs import small_run

from mpidp.errors import CheckpointError
from mpidp.train.records import owner as module
from mpidp.train.records.owner import FILE, Owner
from mpidp.world.system import SILENT_S, Process

ELSEWHERE = {"host": "another.node", "pid": 5, "started": 6}
RUNNING, STARTED_AGAIN = ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(count)} for count in (0, 1))


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives, of another job on this node."""
    process = subprocess.Popen(["sleep", "100"])
    yield process
    process.kill()
    process.wait()


def facts_of(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    return {"pid": process.pid, "started": int(Path(f"/proc/{process.pid}/stat").read_text().split()[21])}


def owned_by(folder: Path, age_s: float = 0.0, environment: dict[str, str] | None = None, **facts: Any) -> Path:
    """The record that another process would have left."""
    path = folder / FILE
    path.write_text(json.dumps(Owner(folder, environment or {})._facts | facts))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def claim(folder: Path, environment: dict[str, str] | None = None) -> None:
    """Take the folder, and give it back."""
    owner = Owner(folder, environment or {})
    owner.claim()
    found = json.loads((folder / FILE).read_text())
    assert found["pid"] == os.getpid() and os.listdir(folder) == [FILE]
    owner.release()
    assert os.listdir(folder) == []


@pytest.mark.job
def test_a_job_that_lives_is_named(tmp_path: Path, other: subprocess.Popen[bytes]) -> None:
    """Behaviour 54: in one line; also if it is the same Slurm job, and if its record is old."""
    path = owned_by(tmp_path, 10 * SILENT_S, RUNNING, **facts_of(other))
    before = path.read_bytes()
    for environment in ({}, RUNNING, STARTED_AGAIN):
        with pytest.raises(CheckpointError, match=f"is in use by Slurm job 7, process {other.pid} on ") as caught:
            claim(tmp_path, environment)
        assert "\n" not in str(caught.value)
    assert path.read_bytes() == before and os.listdir(tmp_path) == [FILE]
    other.kill()
    other.wait()
    claim(tmp_path)


@pytest.mark.job
def test_a_zombie_and_another_process_of_its_number_are_gone(tmp_path: Path, other: subprocess.Popen[bytes]) -> None:
    facts = facts_of(other)
    owned_by(tmp_path, **{**facts, "started": facts["started"] + 1})
    claim(tmp_path)
    owned_by(tmp_path, **facts)
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    claim(tmp_path)


@pytest.mark.parametrize("facts", [ELSEWHERE, {"namespace": 1}], ids=["another node", "another container"])
def test_elsewhere_signs_of_life_count(tmp_path: Path, facts: dict[str, Any]) -> None:
    owned_by(tmp_path, SILENT_S - 60, **facts)
    with pytest.raises(CheckpointError, match="180 s after its last sign of life"):
        claim(tmp_path)
    owned_by(tmp_path, SILENT_S + 60, **facts)
    claim(tmp_path)


def test_a_job_that_slurm_starts_again_goes_on_at_once(tmp_path: Path) -> None:
    owned_by(tmp_path, 0, RUNNING, **ELSEWHERE)
    for environment in (RUNNING, {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}):
        with pytest.raises(CheckpointError, match="is in use by Slurm job 7"):
            claim(tmp_path, environment)
    claim(tmp_path, STARTED_AGAIN)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": "x"}', "\x00\x00"])
def test_a_damaged_record_is_nobodys(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    claim(tmp_path)


@pytest.mark.job
def test_a_copy_is_nobodys(tmp_path: Path, other: subprocess.Popen[bytes]) -> None:
    (tmp_path / "run").mkdir()
    owned_by(tmp_path / "run", **facts_of(other))
    claim(Path(shutil.copytree(tmp_path / "run", tmp_path / "copy")))
    renamed = (tmp_path / "run").rename(tmp_path / "renamed")
    with pytest.raises(CheckpointError, match="in use"):
        claim(renamed)


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("before", ["nobody", "a dead job", "a job that died taking over from a dead job"])
def test_of_many_at_once_one_gets_it(tmp_path: Path, before: str, links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread stands for a job on a node of its own."""
    if not links:
        monkeypatch.setattr(os, "link", _no_links)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that threads alternate between any two lines
    try:
        for _ in range(40):
            if before != "nobody":
                owned_by(tmp_path, 2 * SILENT_S, **ELSEWHERE)
            if "taking over" in before:
                shutil.copy2(tmp_path / FILE, tmp_path / f"{FILE}.next")
            won = _claim_at_once(tmp_path, 8)
            if links:  # else two may take it at once, which nothing can decide
                assert won.count(True) == 1
            assert any(won) and os.listdir(tmp_path) == [FILE]
            (tmp_path / FILE).unlink()
    finally:
        sys.setswitchinterval(interval_s)


def _claim_at_once(folder: Path, jobs: int) -> list[bool]:
    barrier = threading.Barrier(jobs)

    def try_to(number: int) -> bool:
        owner = Owner(folder, {})
        owner._facts |= {"host": f"node{number}"}
        owner._keep_touching = lambda: None  # type: ignore[method-assign]
        barrier.wait()
        try:
            owner.claim()
        except CheckpointError:
            return False
        return True

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(try_to, range(jobs)))


def _no_links(source: Path, target: Path) -> None:
    raise PermissionError("no links")


def test_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOUCH_S", 0.01)
    before = set(threading.enumerate())  # other tests leave owners that never end
    owner = Owner(tmp_path, {})
    owner.claim()
    os.utime(owner.path, (0, 0))
    wait_for(lambda: owner.path.stat().st_mtime > 1e9)
    owner.release()
    wait_for(lambda: all(thread.name != "mpidp-owner" for thread in set(threading.enumerate()) - before))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_who_was_taken_for_dead_writes_no_more(tmp_path: Path) -> None:
    owner = Owner(tmp_path, {})
    owner.claim()
    owner.check()
    owned_by(tmp_path, **ELSEWHERE)
    with pytest.raises(CheckpointError, match=r"now belongs to process 5 on another\.node"):
        owner.check()
    owner.release()
    assert json.loads((tmp_path / FILE).read_text())["host"] == "another.node"


def test_another_rank_takes_over(tmp_path: Path) -> None:
    """As rank 0 died, and the run goes on."""
    owned_by(tmp_path, **ELSEWHERE)
    owner = Owner(tmp_path, {})
    owner.take_over()
    owner.check()
    owner.release()
    assert os.listdir(tmp_path) == []


@pytest.mark.job
def test_a_run_leaves_no_owner_and_its_folder_is_refused_meanwhile(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    """Behaviour 54: refused before anything is read or written."""
    folder = small_run(tmp_path)
    assert not (folder / FILE).exists()
    owned_by(folder, **facts_of(other))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(CheckpointError, match="in use by process"):
        small_run(tmp_path, folder, train__epochs=3)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} | {folder: 0} == before | {folder: 0}
    (folder / FILE).unlink()
    small_run(tmp_path, folder, train__epochs=3)
    assert not (folder / FILE).exists()


@pytest.mark.job
def test_processes_know_themselves(other: subprocess.Popen[bytes]) -> None:
    this = Process.this()
    assert Process.parse(str(this)) == this == Process.this() and this.is_running() is True
    assert Process.parse("cf2225d4") is None
    assert Process(this.pid, this.started + 1, this.namespace, this.host).is_running() is False
    assert Process(2**22 + 1, 1, this.namespace, this.host).is_running() is False
