"""Jobs asked to stop, by real signals or by a file: saved after a step, ended with 75, continued (Behaviour 45).

An epoch has 160 samples in 6 steps, the last of 10. The model tells its process's number and waits a little in each
step, so that a signal meets a run in the middle.
"""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tiny import make_workplace

from jobs import Result, finish, launch, run_job
from mpidp.train.checkpoint.read import load, newest

pytestmark = pytest.mark.timeout(300)  # several jobs a test, each with a limit of its own
TIMEOUT_S = 60.0
POLL_S = 0.02
STEPS, EPOCHS = 6, 3
SLOW = """
import os, time
from pathlib import Path
import own

class Net(own.Net):
    def forward(self, x):
        if self.training and self.step >= 2:
            Path(f"pid_{own.RANK}").write_text(str(os.getpid()))
            time.sleep(float(os.environ.get("PAUSE_S", "0")))
        elif not self.training and "PAUSE_EVALUATION_S" in os.environ:
            Path(f"pid_{own.RANK}").write_text(str(os.getpid()))
            time.sleep(float(os.environ["PAUSE_EVALUATION_S"]))
        return super().forward(x)
"""
TRAIN = ["-m", "mpidp", "train", "run.toml", "--model.name=slow:Net", "--checkpoint.every_epochs=0"]


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    (make_workplace(tmp_path) / "slow.py").write_text(SLOW)
    return tmp_path


def start(folder: Path, ranks: int, *words: str, **environment: str) -> subprocess.Popen[str]:
    """Start to train and return when every rank is in the middle of it."""
    job = launch([*TRAIN, *words], ranks, cwd=folder, environment={"PAUSE_S": "0.1"} | environment)
    wait_for(job, lambda: len(process_ids(folder)) == max(1, ranks))
    return job


def wait_for(job: subprocess.Popen[str], is_there) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + TIMEOUT_S
    while not is_there():
        if job.poll() is not None or time.monotonic() > deadline:
            pytest.fail(finish(job).output)
        time.sleep(POLL_S)


def process_ids(folder: Path) -> list[int]:
    texts = [path.read_text() for path in sorted(folder.glob("pid_*"))]
    return [int(text) for text in texts if text]


def check_stopped(folder: Path, result: Result, reason: str) -> int:
    """Assert that the job ended with 75 after a save that says why; returns the step."""
    assert result.code == 75, result.output
    assert result.output.count(f"stopped by {reason} after step") == 1, result.output
    assert "Traceback" not in result.output
    step = last_step(folder)
    assert f"after step {step} of {STEPS * EPOCHS}" in result.output
    return step


def last_step(folder: Path) -> int:
    return int(newest(folder / "runs/run/checkpoints")[0].name.removeprefix("step_"))


def records(folder: Path, kind: str) -> list[dict[str, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def check_equal_to_uninterrupted(folder: Path) -> None:
    """The run's steps have no gap and no repeat, and its weights are those of a run that nobody stopped."""
    rest = records(folder / "runs/run", "train")
    steps = [int(record["step"]) for record in rest]
    assert steps == sorted(set(steps)) and steps[-1] == STEPS * EPOCHS
    assert sum(record["samples"] for record in rest) == 160 * EPOCHS
    assert [record["step"] for record in records(folder / "runs/run", "validation")] == [6, 12, 18]
    ours, theirs = (load(newest(folder / f"runs/{name}/checkpoints")[0])["model"] for name in ("run", "whole"))
    different = {name: (ours[name] - tensor).abs().max().item() for name, tensor in theirs.items()}
    assert not any(different.values()), f"{different} after {[record['step'] for record in rest]}"


def train(folder: Path, ranks: int, *words: str, **environment: str) -> Result:
    words = (*words, "--checkpoint.every_epochs=1")
    result = run_job([*TRAIN, *words], ranks, TIMEOUT_S, cwd=folder, environment=environment)
    assert result.code == 0, result.output
    return result


@pytest.mark.library
@pytest.mark.parametrize(("number", "whom"), [("SIGTERM", "one"), ("SIGUSR2", "all")])
def test_a_signal_stops_all_ranks_after_the_same_step(workplace: Path, number: str, whom: str) -> None:
    """To the last rank alone, or to all as Slurm does; resumed, the run equals an uninterrupted one bit for bit."""
    job = start(workplace, 3)
    for process in process_ids(workplace)[-1:] if whom == "one" else process_ids(workplace):
        os.kill(process, getattr(signal, number))
    step = check_stopped(workplace, finish(job, TIMEOUT_S), number)
    assert 2 <= step < STEPS * EPOCHS
    result = train(workplace, 3, "--resume=auto")
    assert "--resume=auto: continuing runs/run" in result.output
    assert f"step {step}" in result.output
    train(workplace, 3, "--run.name=whole")
    check_equal_to_uninterrupted(workplace)


@pytest.mark.library
@pytest.mark.short
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_file_stops_the_run_once(workplace: Path, ranks: int) -> None:
    """It is gone when the run has stopped; 0 ranks: without a launcher."""
    job = start(workplace, ranks, PAUSE_S="0.3")
    (workplace / "runs/run/STOP").touch()
    check_stopped(workplace, finish(job, TIMEOUT_S), "the file STOP")
    assert not (workplace / "runs/run/STOP").exists()
    train(workplace, ranks, "--resume=runs/run")
    train(workplace, ranks, "--run.name=whole")
    check_equal_to_uninterrupted(workplace)


def test_a_signal_during_an_evaluation(workplace: Path) -> None:
    """The evaluation is given up, and done again after the resume."""
    environment = {"PAUSE_EVALUATION_S": "0.4", "PAUSE_S": "0"}
    job = launch([*TRAIN, "--data.global_batch=8"], 2, cwd=workplace, environment=environment)
    wait_for(job, lambda: (workplace / "runs/run/metrics.jsonl").exists() and records(workplace / "runs/run", "train"))
    wait_for(job, lambda: records(workplace / "runs/run", "train")[-1]["step"] == 20)
    time.sleep(0.2)
    os.kill(process_ids(workplace)[0], signal.SIGUSR2)
    result = finish(job, TIMEOUT_S)
    assert result.code == 75, result.output
    assert last_step(workplace) == 20
    assert records(workplace / "runs/run", "validation") == []
    train(workplace, 2, "--resume=auto", "--data.global_batch=8")
    assert [record["step"] for record in records(workplace / "runs/run", "validation")] == [20, 40, 60]


def test_a_job_that_slurm_starts_again_continues_its_own_run(workplace: Path) -> None:
    """Not another job's newer one; without a checkpoint it begins anew, aloud. Array tasks have their own names."""
    task = {"SLURM_JOB_ID": "71", "SLURM_ARRAY_TASK_ID": "4"}
    job = start(workplace, 2, **task)
    os.kill(process_ids(workplace)[0], signal.SIGTERM)
    result = finish(job, TIMEOUT_S)
    assert result.code == 75, result.output
    train(workplace, 2, "--train.epochs=1", **task | {"SLURM_JOB_ID": "72"})
    assert sorted(path.name for path in (workplace / "runs").iterdir()) == ["run_4", "run_4-2"]

    result = train(workplace, 2, **task, SLURM_RESTART_COUNT="1")
    assert "Slurm started job 71 again: continuing runs/run_4\n" in result.output
    assert records(workplace / "runs/run_4", "train")[-1]["step"] == STEPS * EPOCHS
    result = train(workplace, 2, "--train.epochs=1", SLURM_JOB_ID="73", SLURM_RESTART_COUNT="2")
    assert "Slurm started job 73 again: no run folder of it; starting from the beginning" in result.output


OWN_LOOP = """
import os, signal, sys, time
import mpidp
world = mpidp.init()
stop = mpidp.StopSignal(world)
for step in range(1000):
    if step == 5 and world.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    world.sum([1.0])
    if stop.agreed():
        print(f"rank {world.rank} saves after {step} because of {stop.agreed()}", flush=True)
        stop.exit()
"""


@pytest.mark.library
def test_a_loop_of_ones_own() -> None:
    result = run_job(["-c", OWN_LOOP], 3)
    assert result.code == 75, result.output
    for rank in range(3):
        assert f"rank {rank} saves after 6 because of SIGTERM" in result.output
    assert "left the job" not in result.output
