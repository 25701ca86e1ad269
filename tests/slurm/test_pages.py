"""The commands of README.md and docs/tutorial/cluster.md that need a Slurm, typed as written (Behaviour 50)."""

import shutil
import subprocess
from pathlib import Path

import pytest
from cluster import ROOT, Cluster
from page_commands import commands
from workplace import starts

PAGE = (ROOT / "docs/tutorial/cluster.md").read_text()
# What the page says of nodes without GPUs, and the size of the nodes here.
ON_CPUS, HERE = "--ranks-per-node 8 --cpus-per-task 16", "--ranks-per-node 1 --cpus-per-task 2"
# The site's modules, which a job gets from the environment that it was submitted in.
MODULES = {"BASH_FUNC_module%%": '() { echo "module $*"; }'}
END = "mpidp ended with exit code 0"


@pytest.fixture
def checkout(workplace: Path) -> Path:
    """The folder with the project's own run file, which the pages name."""
    shutil.copy(ROOT / "jobs/digits.toml", workplace / "jobs")
    return workplace


def typed(cluster: Cluster, text: str, cwd: Path) -> str:
    return cluster.run("bash", "-c", text, cwd=cwd, **MODULES)


def shows(cluster: Cluster, text: str, line: str, cwd: Path) -> bool:
    """Whether a command, which does not end by itself, comes to print a line with that in it."""
    with subprocess.Popen(
        text.split(), cwd=cwd, env=cluster.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        try:
            return any(line in printed for printed in process.stdout)
        finally:
            process.kill()


def test_ten_lines(cluster: Cluster, checkout: Path) -> None:
    """From the login node to a job that trains on both nodes, but for the first four, which check out and install."""
    plan, kinds, script, submit, status, tail = (command.text for command in commands(PAGE)[4:10])
    assert "8 ranks" in typed(cluster, plan, checkout)
    assert "pmi2" in typed(cluster, kinds, checkout)

    assert f"without GPUs use `{ON_CPUS}` instead of `--gpus-per-node`" in " ".join(PAGE.split())
    for part, here in (("--gpus-per-node 4", HERE), ("--mpi pmix", "--mpi pmi2"), ("--dry-run", "--dry-run")):
        assert part in script
        script = script.replace(part, here)
    lines = typed(cluster, script, checkout).splitlines()
    assert {"#SBATCH --nodes=2", "#SBATCH --requeue", "module load python openmpi"} <= set(lines)

    assert submit == "mpidp submit ... (the same, without --dry-run)"
    output = typed(cluster, script.replace(" --dry-run", ""), checkout)
    number = output.split()[1].rstrip(":")
    assert output.startswith(f"job {number}: 2 ranks on 2 nodes for at most 1:00:00")
    cluster.wait(number, lambda job: "  step " in job.log)
    run, state, *_ = typed(cluster, status, checkout).splitlines()[1].split()
    assert (run, state) in (("digits", "running"), ("digits", "done"))
    assert shows(cluster, tail.replace("4711", number), END, checkout)

    job = cluster.wait(number)
    assert (job.state, job.code) == ("COMPLETED", 0), job.log
    assert job.log.startswith("module load python openmpi\n") and "epoch  15/15" in job.log
    (start,) = starts(checkout / "runs/digits")
    assert (start["ranks"], start["nodes"], start["launcher"]) == (2, 2, "Slurm's srun")


def test_the_readme(cluster: Cluster, checkout: Path) -> None:
    """A script of the project, submitted, and what is said of its run."""
    texts = [command.text for command in commands((ROOT / "README.md").read_text())]
    (submit,) = (text for text in texts if text.startswith("sbatch"))
    (status,) = (text for text in texts if text.startswith("mpidp status"))
    number = typed(cluster, f"{submit} --train.epochs=2", checkout).split()[
        -1
    ]  # the page says 15, for a larger machine
    job = cluster.wait(number)
    assert (job.state, job.code) == ("COMPLETED", 0), job.log
    assert END in job.log
    text = typed(cluster, status, checkout)
    assert f"Slurm job {number}: " in text and "46 of 46" in text
