"""Two jobs that want one run folder: the second one is refused as long as the first one lives (Behaviour 54)."""

import time
from pathlib import Path

import pytest
from test_resume import POLL_S, TIMEOUT_S, records, train
from tiny import make_workplace

from jobs import finish, kill, launch, run_job
from mpidp.train.checkpoint.read import newest_first

pytestmark = pytest.mark.timeout(300)  # several jobs a test, each with a limit of its own
RANKS = 2
WORDS = ["--checkpoint.every_steps=4", "--checkpoint.background=False"]


def test_a_second_job_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    folder = make_workplace(tmp_path)
    train(folder, RANKS, *WORDS, "--run.name=whole")
    first = launch(["-m", "mpidp", "train", "run.toml", *WORDS], RANKS, cwd=folder, environment={"STOP_AT": "10"})
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not (folder / "stopped").exists() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        run = folder / "runs/run"
        before = (
            (run / "metrics.jsonl").read_bytes(),
            (run / "env.json").read_bytes(),
            newest_first(run / "checkpoints"),
        )
        for resume in ("runs/run", "auto"):
            second = run_job(
                ["-m", "mpidp", "train", "run.toml", *WORDS, f"--resume={resume}"], RANKS, TIMEOUT_S, cwd=folder
            )
            assert second.code == 1 and "Traceback" not in second.output, second.output
            assert second.output.count("runs/run is in use by process") == 1
            assert "resumed from" not in second.output
        assert before == (
            (run / "metrics.jsonl").read_bytes(),
            (run / "env.json").read_bytes(),
            newest_first(run / "checkpoints"),
        )
        assert first.poll() is None
    finally:
        kill(first)
        finish(first)
    result = train(folder, RANKS, *WORDS, "--resume=auto")
    assert "step_00000008: step 8" in result.output
    assert records(run) == records(folder / "runs/whole")
    assert not (run / "owner.json").exists()
