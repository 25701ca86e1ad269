"""`mpidp data convert` that is stopped: the target is whole or not there, and nothing is said but why."""

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
from data_files import leftovers, run

import mpidp

pytestmark = pytest.mark.job


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Whoever starts the tests in the background may have them ignore SIGINT, and so their children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def job(tmp_path: Path, interruptible: None) -> subprocess.Popen[bytes]:
    """A conversion that takes seconds, in the middle of it."""
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["x"] = np.tile(np.random.default_rng(0).integers(0, 1000, (20_000, 100)), (10, 1))
    words = ["convert", str(tmp_path / "in.h5"), str(tmp_path / "out.h5"), "--compression=gzip:6", "--workers=2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(mpidp.__file__).parents[1])}
    with open(tmp_path / "log", "wb") as log:
        job = subprocess.Popen([sys.executable, "-m", "mpidp", "data", *words], env=environment, stderr=log)
    wait_for(lambda: [path for path in tmp_path.glob("*.part/whole.h5") if path.stat().st_size > 1 << 20], "chunk")
    return job


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 40.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"no {what} within {timeout_s} s"
        time.sleep(0.005)


def test_an_interrupt_ends_it_with_130_and_leaves_nothing(job: subprocess.Popen[bytes], tmp_path: Path) -> None:
    job.send_signal(signal.SIGINT)
    assert job.wait(timeout=40) == 130
    assert (tmp_path / "log").read_text() == "mpidp: error: interrupted\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.h5", "log"]


def test_killed_it_leaves_no_target_and_hinders_no_other(job: subprocess.Popen[bytes], tmp_path: Path) -> None:
    job.kill()
    job.wait()
    assert not (tmp_path / "out.h5").exists() and len(leftovers(tmp_path)) == 1
    assert run("convert", tmp_path / "in.h5", tmp_path / "out.h5", "--compression=none") == 0
    with h5py.File(tmp_path / "out.h5") as new, h5py.File(tmp_path / "in.h5") as old:
        assert (new["x"][...] == old["x"][...]).all()
