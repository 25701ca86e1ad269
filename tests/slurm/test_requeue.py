"""Jobs that are interrupted by a real Slurm, requeued and continued, in the same run folder and log (Behaviour 45)."""

import re
import sys
from pathlib import Path

import pytest
from cluster import Cluster, Job
from workplace import check_complete, fill_in, records, starts

LATE = r"""#!/bin/bash
touch "here_$SLURM_PROCID"
((SLURM_RESTART_COUNT)) || sleep 60
exec "$PYTHON" "$@"
"""
EARLY = """
import time
print("nothing trained yet", flush=True)
time.sleep(2)
from own import Net
"""
SLOW = {"PAUSE_S": "0.4"}  # an epoch of 12 steps then takes 5 s, besides importing torch


def start(cluster: Cluster, folder: Path, *words: str) -> str:
    """Submit the preemptible template and wait until it trains."""
    number = cluster.submit("jobs/preemptible.sbatch", "run.toml", *words, cwd=folder, **SLOW)
    cluster.wait(number, lambda job: "  step " in job.log)
    return number


def check_resumed(job: Job, run: Path, stopped_by: str = "") -> None:
    """Assert that the job went on once where it had stopped, and that not a step was lost or made twice."""
    assert (job.state, job.code, job.restarts) == ("COMPLETED", 0, 1), job.log
    check_complete(run)
    first, second = starts(run)
    assert first["slurm_job_id"] == second["slurm_job_id"] == job.number
    assert job.log.count(f"Slurm started job {job.number} again: continuing") == 1
    if stopped_by:
        assert job.log.count(f"stopped by {stopped_by} after step") == 1, job.log
        step = int(job.log.split(f"stopped by {stopped_by} after step ")[1].split()[0])
        assert f"resumed from runs/digits/checkpoints/step_{step:08d}" in job.log
        assert step in [record["step"] for record in records(run)]


def test_preempted_by_a_higher_partition(cluster: Cluster, workplace: Path) -> None:
    """Slurm warns with the signal that --signal names, and takes the nodes when the job has saved."""
    number = start(cluster, workplace)
    urgent = cluster.submit("--partition=urgent", "--exclusive", "--nodes=2", "--wrap=sleep 3", cwd=workplace)
    job = cluster.wait(urgent)
    assert job.state == "COMPLETED"
    check_resumed(cluster.wait(number), workplace / "runs/digits", "SIGUSR2")


def test_preempted_without_a_warning_of_ones_own(cluster: Cluster, workplace: Path) -> None:
    """A script without --signal gets SIGTERM, at the beginning of the partition's grace time."""
    script = workplace / "jobs/preemptible.sbatch"
    script.write_text(script.read_text().replace("#SBATCH --signal", "##SBATCH --signal"))
    number = start(cluster, workplace)
    cluster.wait(cluster.submit("--partition=urgent", "--exclusive", "--nodes=2", "--wrap=true", cwd=workplace))
    check_resumed(cluster.wait(number), workplace / "runs/digits", "SIGTERM")


@pytest.mark.timeout(400)
def test_the_time_limit(cluster: Cluster, workplace: Path) -> None:
    """Slurm warns up to a minute early, and keeps time by minutes."""
    script = workplace / "jobs/preemptible.sbatch"
    script.write_text(fill_in(script.read_text(), **{"--time": "00:02:00", "--signal": "USR2@70"}))
    number = cluster.submit("jobs/preemptible.sbatch", "run.toml", "--train.epochs=2", cwd=workplace, PAUSE_S="4")
    cluster.wait(number, lambda job: job.restarts == 1, timeout_s=180)
    cluster.run("scancel", "--signal=USR2", number, cwd=workplace, check=False)
    log = cluster.job(number).log
    assert log.count("stopped by SIGUSR2 after step") == 1, log
    assert "ended with exit code 75 after 0 restarts" in log


def test_a_signal_by_hand(cluster: Cluster, workplace: Path) -> None:
    """`scancel --signal` reaches the ranks and not the script, which requeues."""
    number = start(cluster, workplace)
    cluster.run("scancel", "--signal=TERM", number, cwd=workplace)
    check_resumed(cluster.wait(number), workplace / "runs/digits", "SIGTERM")


def test_a_signal_before_python_is_there(cluster: Cluster, workplace: Path) -> None:
    """It ends the ranks, which had nothing to save; the job comes back all the same, and begins."""
    (workplace / "bin").mkdir()
    late = workplace / "bin/python"
    late.write_text(LATE)
    late.chmod(0o755)
    path = f"{workplace}/bin:{cluster.environment()['PATH']}"
    number = cluster.submit("jobs/preemptible.sbatch", "run.toml", cwd=workplace, PATH=path, PYTHON=sys.executable)
    cluster.wait(number, lambda job: len(list(workplace.glob("here_*"))) == 2)
    cluster.run("scancel", "--signal=USR2", number, cwd=workplace)
    job = cluster.wait(number)
    assert (job.state, job.code, job.restarts) == ("COMPLETED", 0, 1), job.log
    assert "ended with exit code 140 after 0 restarts" in job.log
    check_complete(workplace / "runs/digits")


def test_a_signal_at_each_start(cluster: Cluster, workplace: Path) -> None:
    """Before the first step: each start takes a step or two and saves them, so the run gets on all the same."""
    (workplace / "early.py").write_text(EARLY)
    words = ("jobs/preemptible.sbatch", "run.toml", "--model.name=early:Net")
    number = cluster.submit(*words, cwd=workplace)
    for restart in range(2):
        cluster.wait(number, lambda job, ranks=2 * (restart + 1): job.log.count("nothing trained yet") == ranks)
        cluster.run("scancel", "--signal=USR2", number, cwd=workplace)
        cluster.wait(number, lambda job, restarts=restart + 1: job.restarts == restarts)
    job = cluster.wait(number)
    assert (job.state, job.code, job.restarts) == ("COMPLETED", 0, 2), job.log
    check_complete(workplace / "runs/digits")
    first, second = map(int, re.findall(r"stopped by SIGUSR2 after step (\d+)", job.log))
    assert 0 < first <= 2 and first < second <= first + 2  # two ranks hear of it a step later


def test_a_cancelled_job_does_not_come_back(cluster: Cluster, workplace: Path) -> None:
    number = start(cluster, workplace)
    cluster.run("scancel", number, cwd=workplace)
    job = cluster.wait(number)
    assert (job.state, job.restarts) == ("CANCELLED", 0), job.log


def test_a_node_that_dies(cluster: Cluster, workplace: Path) -> None:
    """Slurm requeues by itself; the run goes on from the last checkpoint, before the death."""
    number = start(cluster, workplace, "--checkpoint.every_steps=2", "--train.epochs=3")
    cluster.wait(number, lambda job: any((workplace / "runs/digits/checkpoints").glob("step_*")))
    cluster.kill_node("n2")
    try:
        cluster.wait(number, lambda job: job.restarts == 1, timeout_s=90)
    finally:
        cluster.start_node("n2")
    job = cluster.wait(number)
    assert (job.state, job.code, job.restarts) == ("COMPLETED", 0, 1), job.log
    assert f"Slurm started job {number} again: continuing runs/digits" in job.log
    check_complete(workplace / "runs/digits", epochs=3)
