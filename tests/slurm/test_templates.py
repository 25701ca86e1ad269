"""The project's job scripts, accepted by a real Slurm and run there with their site lines filled in (Behaviour 49)."""

from pathlib import Path

import pytest
from cluster import ROOT, Cluster
from workplace import check_complete, fill_in, starts

TEMPLATES = sorted(path.name for path in (ROOT / "jobs").glob("*.sbatch"))


def run(cluster: Cluster, folder: Path, template: str, *words: str) -> str:
    """Run a template to a good end; its log."""
    job = cluster.wait(cluster.submit(f"jobs/{template}", *words, cwd=folder))
    assert (job.state, job.code) == ("COMPLETED", 0), job.log
    assert "ended with exit code 0" in job.log
    return job.log


@pytest.mark.parametrize("template", TEMPLATES)
def test_accepted(cluster: Cluster, template: str, workplace: Path) -> None:
    output = cluster.run("sbatch", "--test-only", f"jobs/{template}", cwd=workplace)
    assert "to start at" in output


@pytest.mark.parametrize(
    ("template", "nodes"), [("single_node.sbatch", 1), ("multi_node.sbatch", 2), ("cpu.sbatch", 2)]
)
def test_nodes(cluster: Cluster, workplace: Path, template: str, nodes: int) -> None:
    """Two ranks a node, with their own cores and as many threads."""
    script = workplace / "jobs" / template
    script.write_text(fill_in(script.read_text(), **{"--ntasks-per-node": "2", "--gpus-per-node": "2"}))
    log = run(cluster, workplace, template, "run.toml", "--train.epochs=1")
    assert f"{2 * nodes} ranks on {nodes} node" in log
    check_complete(workplace / "runs/digits", epochs=1)
    (start,) = starts(workplace / "runs/digits")
    assert (start["ranks"], start["threads"], start["launcher"]) == (2 * nodes, 2, "Slurm's srun")


def test_the_exit_code_is_the_programs(cluster: Cluster, workplace: Path) -> None:
    job = cluster.wait(cluster.submit("jobs/multi_node.sbatch", "absent.toml", cwd=workplace))
    assert (job.state, job.code) == ("FAILED", 2), job.log
    assert job.log.count("absent.toml: no such file") == 1
    assert "ended with exit code 2" in job.log


def test_stage(cluster: Cluster, workplace: Path) -> None:
    """The data are read from the copy, which is gone afterwards."""
    (workplace / "local").mkdir()
    (workplace / "run.toml").write_text((workplace / "run.toml").read_text().replace("data/digits.h5", "absent.h5"))
    number = cluster.submit(
        "jobs/stage.sbatch", "data/digits.h5", "run.toml", cwd=workplace, NODE_LOCAL=str(workplace / "local")
    )
    job = cluster.wait(number)
    assert (job.state, job.code) == ("COMPLETED", 0), job.log
    check_complete(workplace / "runs/digits")
    assert f"{workplace}/local/mpidp-{number}/digits.h5" in (workplace / "runs/digits/config.toml").read_text()
    assert list((workplace / "local").iterdir()) == []


def test_container(cluster: Cluster, workplace: Path) -> None:
    """With a stand-in for the runtime: it notes its words and runs the command without a container."""
    (workplace / "bin").mkdir()
    runtime = workplace / "bin/apptainer"
    runtime.write_text('#!/bin/bash\necho "$@" >>words\nwhile [[ $1 != *.sif ]]; do shift; done\nshift\nexec "$@"\n')
    runtime.chmod(0o755)
    path = f"{workplace}/bin:{cluster.environment()['PATH']}"
    number = cluster.submit(
        "jobs/container.sbatch", "image.sif", "run.toml", cwd=workplace, PATH=path, SITE_MPI="/opt/mpi"
    )
    job = cluster.wait(number)
    assert (job.state, job.code) == ("COMPLETED", 0), job.log
    check_complete(workplace / "runs/digits")
    words = (workplace / "words").read_text().splitlines()
    assert len(words) == 2
    assert words[0] == (
        f"exec --bind {workplace} --pwd {workplace} --nv --bind /opt/mpi --env LD_LIBRARY_PATH=/opt/mpi/lib image.sif "
        f"python -m mpidp train run.toml"
    )


def test_array(cluster: Cluster, workplace: Path) -> None:
    """Each task has its own run and its own settings; one that is stopped comes back by itself, once.

    The signal goes to the task's step. Sent to the task, while two others wait, Slurm 22.05 delivers it and answers
    scancel "Job can not be altered now, try again later" nevertheless; scancel then sends it again after 5, 6, 7 s and
    so on, ten times at most. Measured: nine times in 68 s, of which the first reached the task and the last the
    requeued one, which stopped once more. With one task waiting, none, or a job that is no array, it was sent once.
    """
    number = cluster.submit("--array=0-2%1", "jobs/array.sbatch", "run.toml", cwd=workplace, PAUSE_S="0.15")
    task = f"{number}_0"
    cluster.wait(task, lambda job: "  step " in job.log)
    cluster.run("scancel", "--signal=USR2", f"{task}.0", cwd=workplace)
    for place, setting in enumerate(("lr = 0.001", "lr = 0.003", "global_batch = 128")):
        job = cluster.wait(f"{number}_{place}")
        assert (job.state, job.code) == ("COMPLETED", 0), job.log
        assert job.restarts == (1 if place == 0 else 0), job.log
        folder = workplace / f"runs/digits_{place}"
        check_complete(folder)
        assert setting in (folder / "config.toml").read_text()
    assert sorted(path.name for path in (workplace / "runs").iterdir()) == ["digits_0", "digits_1", "digits_2"]


def test_chain(cluster: Cluster, workplace: Path) -> None:
    """The first job is stopped, the second goes on to the end, the third is not needed."""
    first = cluster.submit("jobs/chain.sbatch", "3", "run.toml", cwd=workplace, PAUSE_S="0.3")
    cluster.wait(first, lambda job: "  step " in job.log)
    cluster.run("scancel", "--signal=TERM", first, cwd=workplace)
    job = cluster.wait(first)
    assert (job.state, job.code) == ("FAILED", 75), job.log
    second = job.log.split("the next job is ")[1].strip()
    job = cluster.wait(second)
    assert (job.state, job.code) == ("COMPLETED", 0), job.log
    third = job.log.split("the next job is ")[1].strip()
    assert cluster.wait(third).state == "CANCELLED"
    check_complete(workplace / "runs/digits")
    assert [start["slurm_job_id"] for start in starts(workplace / "runs/digits")] == [first, second]


def test_a_chain_ends_with_a_failure_that_would_come_again(cluster: Cluster, workplace: Path) -> None:
    first = cluster.wait(cluster.submit("jobs/chain.sbatch", "3", "absent.toml", cwd=workplace))
    assert (first.state, first.code) == ("FAILED", 2), first.log
    assert cluster.wait(first.log.split("the next job is ")[1].strip()).state == "CANCELLED"
