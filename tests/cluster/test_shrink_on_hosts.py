"""Ranks and hosts that die while others go on. Needs Open MPI 5, whose launcher takes --with-ft ulfm."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from cluster import JOB_TIMEOUT_S
from shrink_job import STEPS_AN_EPOCH, TRAINED, has_ulfm, make_place, train
from test_shrink import check

pytestmark = [
    pytest.mark.timeout(3 * JOB_TIMEOUT_S),
    pytest.mark.skipif(not has_ulfm(), reason="the launcher is not Open MPI's: no user-level failure mitigation"),
]
POLL_S = 0.01
LONG_EPOCHS = 40  # long enough for a host to be killed meanwhile
LAST_STEP = LONG_EPOCHS * STEPS_AN_EPOCH
UseHosts = Callable[[Sequence[int]], None]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return make_place(tmp_path / "shrink")


def kill_host(name: str) -> None:
    """Kill the launcher's daemon on a host, which is all that keeps the host alive: everything on it dies at once."""
    pids = subprocess.run(["ip", "netns", "pids", name], check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    (daemon,) = (int(pid) for pid in pids if Path(f"/proc/{pid}/comm").read_text().strip() == "prted")
    os.kill(daemon, signal.SIGKILL)


def test_ranks_of_other_hosts_are_killed(place: Path, use_hosts: UseHosts) -> None:
    """Behaviour 31: between hosts as within one; the message says which host it was."""
    use_hosts((1, 1))
    untroubled = train(place, 2)
    use_hosts((1, 1, 1, 1))
    trained = train(place, 4, "3:reduce:5 0:optimizer:9")
    check(trained, untroubled, [[3], [0]])
    assert [one["host"] for of_loss in trained.of_losses for one in of_loss["lost"]] == ["mpidp-h4", "mpidp-h1"]
    assert "mpidp: lost rank 3 (mpidp-h4)" in trained.result.output


def test_a_host_is_lost_with_its_daemon(place: Path, use_hosts: UseHosts) -> None:
    """Behaviours 31, 43: the launcher ends the job, as docs/howto/fault_tolerance.md says; it goes on without it."""

    def kill() -> None:
        start = time.monotonic()
        notes = place / "notes_2"
        while not (notes.exists() and "taken 7 " in notes.read_text()) and time.monotonic() - start < JOB_TIMEOUT_S:
            time.sleep(POLL_S)
        kill_host("mpidp-h3")

    words = ("--run.name", "lost", "--train.epochs", str(LONG_EPOCHS), "--checkpoint.every-steps", "2")
    use_hosts((1, 1, 1))
    ended = train(place, 3, "", words, killer=kill)
    assert re.search("lost communication with a remote daemon|daemon failed to report back", ended.result.output)
    assert max(ended.losses) < LAST_STEP and not ended.lost  # whatever the exit code, which the launcher may have as 0

    use_hosts((1, 1))
    (place / "runs/lost/owner.json").unlink()  # new hosts cannot see that its process is gone, and would wait
    resumed = train(place, 2, "", (*words, "--resume", "runs/lost"))
    assert resumed.result.code == 0, resumed.result.output
    assert max(resumed.losses) == LAST_STEP
    steps = [(record["step"], record["samples"]) for record in resumed.records if record["kind"] == "train"]
    assert [step for step, _ in steps] == list(range(1, LAST_STEP + 1))  # those of the first job, and the rest
    assert sum(samples for _, samples in steps) == LONG_EPOCHS * TRAINED
