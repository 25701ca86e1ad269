"""`mpidp submit` to the end of the job, and `mpidp status` meanwhile (Behaviours 40, 49)."""

from pathlib import Path

from cluster import Cluster
from workplace import check_complete, starts

SIZE = ("--nodes=2", "--ranks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=2", "--time=5")


def test_submitted_stopped_and_done(cluster: Cluster, workplace: Path) -> None:
    """It says where log and run folder will be, comes back when it is stopped, and status knows about it."""
    words = ("python", "-m", "mpidp", "submit", "run.toml", *SIZE, "--requeue", "--train.epochs=2")
    output = cluster.run(*words, cwd=workplace, PAUSE_S="0.4")
    number = output.split()[1].rstrip(":")
    assert f"job {number}: 2 ranks on 2 nodes for at most 5; requeued when stopped" in output
    assert f"log:        {workplace}/slurm-digits-{number}.out" in output
    assert f"run folder: {workplace}/runs/digits " in output

    cluster.wait(number, lambda job: "  step " in job.log)
    text = cluster.run("python", "-m", "mpidp", "status", "runs/digits", cwd=workplace)
    assert f"Slurm job {number}: RUNNING, " in text and "state:      running" in text and " of 24, loss " in text
    cluster.run("scancel", "--signal=USR2", number, cwd=workplace)
    job = cluster.wait(number)
    assert (job.state, job.code, job.restarts) == ("COMPLETED", 0, 1), job.log
    check_complete(workplace / "runs/digits")
    assert len(starts(workplace / "runs/digits")) == 2
    text = cluster.run("python", "-m", "mpidp", "status", cwd=workplace)
    assert text.splitlines()[1].split()[:5] == ["digits", "done", "24", "of", "24"]


def test_what_sbatch_refuses(cluster: Cluster, workplace: Path) -> None:
    """The reason is Slurm's own."""
    words = ("python", "-m", "mpidp", "submit", "run.toml", *SIZE, "--partition=absent")
    output = cluster.run(*words, cwd=workplace, check=False)
    assert "sbatch refused the job" in output and "invalid partition specified: absent" in output
