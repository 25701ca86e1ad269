"""`mpidp data convert` that is killed: the target is whole or not there, and the same command goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
from data_files import assert_same, error_of, leftovers, read, run

import mpidp

ROWS, CHUNK_ROWS = 40_000, 4000
VALUES = np.random.default_rng(0).integers(0, 1000, (ROWS, 100))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["x"], file["y"] = VALUES, np.arange(ROWS)
    return tmp_path / "in.h5"


@pytest.fixture
def long_source(tmp_path: Path) -> Path:
    """One whose conversion takes seconds from the first task to the last, so that a signal meets it in between."""
    with h5py.File(tmp_path / "long.h5", "w") as file:
        file["x"] = np.tile(VALUES, 5)
    return tmp_path / "long.h5"


def words_for(source: Path, target: Path, *more: str) -> list[str]:
    return ["convert", str(source), str(target), f"--chunk-rows={CHUNK_ROWS}", "--compression=gzip:6", *more]


def start(words: list[str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(Path(mpidp.__file__).parents[1])}
    with open(log_of(words), "wb") as log:
        return subprocess.Popen([sys.executable, "-m", "mpidp", "data", *words], env=environment, stderr=log)


def log_of(words: list[str]) -> Path:
    """Where a started command's errors go."""
    return Path(f"{words[2]}.log")


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 40.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"no {what} within {timeout_s} s"
        time.sleep(0.005)


def lines_of(target: Path) -> list[str]:
    record = Path(f"{target}.part.jsonl")
    return record.read_text().splitlines() if record.exists() else []


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    """A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("more", [["--workers=2"], ["--workers=1", "--shuffle-rows=3", "--memory=40MiB"]])
def test_killed_it_goes_on_and_ends_with_the_same_bytes(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    """SIGKILL in the middle: no target, no process left; then only what was missing is done."""
    assert run(*words_for(source, tmp_path / "whole.h5", *more)) == 0
    words = words_for(source, tmp_path / "out.h5", *more)
    job = start(words)
    wait_for(lambda: len(lines_of(tmp_path / "out.h5")) > 3, "third task")
    children = children_of(job.pid)
    job.kill()
    job.wait()
    assert not (tmp_path / "out.h5").exists()
    wait_for(lambda: not any(map(is_running, children)), "end of the workers")
    done = sum(line.endswith("}") for line in lines_of(tmp_path / "out.h5")) - 1
    capsys.readouterr()
    assert run(*words) == 0
    assert f"going on where an earlier start was: {done} of" in capsys.readouterr().err
    assert (tmp_path / "out.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()
    assert leftovers(tmp_path) == []


def test_killed_again_and_again(source: Path, tmp_path: Path) -> None:
    """Each start gets some tasks further, wherever it is killed, and the last one finishes."""
    words = words_for(source, tmp_path / "out.h5", "--workers=1")
    done = 1
    for _ in range(4):
        job = start(words)
        before = done
        wait_for(lambda before=before: len(lines_of(tmp_path / "out.h5")) > before, "task")  # type: ignore[misc]
        job.kill()
        job.wait()
        done = len(lines_of(tmp_path / "out.h5"))
    assert run(*words) == 0
    assert_same(read(tmp_path / "out.h5")["x"], VALUES)
    assert_same(read(tmp_path / "out.h5")["y"], np.arange(ROWS))


@pytest.fixture
def unfinished(source: Path, tmp_path: Path) -> list[str]:
    """The words of a conversion that was killed while it put the file together: everything was encoded."""
    words = words_for(source, tmp_path / "out.h5", "--workers=1")
    for _ in range(10):
        job = start(words)
        wait_for(lambda job=job: (tmp_path / "out.h5.part.h5").exists() or job.poll() is not None, "file")  # type: ignore[misc]
        job.kill()
        job.wait()
        if not (tmp_path / "out.h5").exists():
            return words
        (tmp_path / "out.h5").unlink()  # it was finished before it could be killed
    pytest.fail("it was always finished before it could be killed")


def test_killed_while_putting_the_file_together(unfinished: list[str], tmp_path: Path) -> None:
    assert run(*unfinished) == 0
    assert_same(read(tmp_path / "out.h5")["x"], VALUES)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("damage", ["torn line", "flipped byte", "lost end"])
def test_what_is_damaged_is_done_again(
    unfinished: list[str], tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    part, record = tmp_path / "out.h5.part", tmp_path / "out.h5.part.jsonl"
    if damage == "torn line":
        record.write_text(record.read_text()[:-9])
    elif damage == "lost end":
        os.truncate(part, part.stat().st_size - 100)
    else:
        data = bytearray(part.read_bytes())
        data[len(data) // 2] ^= 1
        part.write_bytes(data)
    capsys.readouterr()
    assert run(*unfinished) == 0
    assert ("is done again" in capsys.readouterr().err) is (damage != "torn line")
    assert_same(read(tmp_path / "out.h5")["x"], VALUES)


def test_the_part_of_another_conversion_is_not_used(
    unfinished: list[str], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other settings, or a source that has changed: an error that names what differs; the part is kept."""
    error = error_of(capsys, *unfinished, "--fletcher32", code=1)
    assert 'filters was "gzip:6 shuffle" and is now "gzip:6 shuffle fletcher32"' in error
    with h5py.File(source, "r+") as file:
        file["x"][0, 0] += 1
    os.utime(source, ns=(1, 1))
    assert "source was" in error_of(capsys, *unfinished, code=1)
    assert json.loads((tmp_path / "out.h5.part.jsonl").read_text().splitlines()[0])["format"] == 1
    assert not (tmp_path / "out.h5").exists()


def test_two_at_a_time_are_refused(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = words_for(source, tmp_path / "out.h5", "--workers=1")
    job = start(words)
    try:
        wait_for(lambda: len(lines_of(tmp_path / "out.h5")) > 1, "first task")
        job.send_signal(signal.SIGSTOP)
        assert "another process is writing it" in error_of(capsys, *words, code=1)
    finally:
        job.send_signal(signal.SIGCONT)
    assert job.wait() == 0
    assert_same(read(tmp_path / "out.h5")["x"], VALUES)


def test_a_killed_worker_ends_it_with_an_error(long_source: Path, tmp_path: Path) -> None:
    """As the kernel does where memory is short; what was done is kept."""
    words = words_for(long_source, tmp_path / "out.h5", "--workers=2")
    job = start(words)
    wait_for(lambda: len(lines_of(tmp_path / "out.h5")) > 1, "first task")
    # One child is multiprocessing's resource tracker, which may go too.
    for child in children_of(job.pid):
        os.kill(child, signal.SIGKILL)
    assert job.wait(timeout=40) == 1
    assert "a worker process was killed" in log_of(words).read_text()
    assert not (tmp_path / "out.h5").exists() and len(lines_of(tmp_path / "out.h5")) > 1


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Whoever starts the tests in the background may have them ignore SIGINT, and so their children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_it_with_130(long_source: Path, tmp_path: Path) -> None:
    words = words_for(long_source, tmp_path / "out.h5", "--workers=2")
    job = start(words)
    wait_for(lambda: len(lines_of(tmp_path / "out.h5")) > 1, "first task")
    job.send_signal(signal.SIGINT)
    assert job.wait(timeout=40) == 130
    said = log_of(words).read_text()
    assert said.endswith("mpidp: error: interrupted\n") and "Traceback" not in said
