"""A batch job in; the job in Slurm's queue, and where its log and its run folder will be, out."""

import itertools
import shutil
import subprocess
from pathlib import Path

from mpidp.config import RunConfig
from mpidp.errors import LaunchError
from mpidp.tools.batch_script import BatchJob, render


def submit(job: BatchJob) -> str:
    """Hand the script to sbatch; the job's number.

    Raises:
        LaunchError: there is no sbatch here, or it refused; the text is its own.
    """
    if shutil.which("sbatch") is None:
        raise LaunchError(
            "there is no sbatch here: submit on a login node of the cluster, or look at the script with --dry-run."
        )
    done = subprocess.run(["sbatch", "--parsable"], input=render(job), capture_output=True, encoding="utf-8")
    if done.returncode:
        raise LaunchError(f"sbatch refused the job (exit code {done.returncode}): {done.stderr.strip()}")
    return done.stdout.split(";")[0].strip()


def describe_submitted(number: str, job: BatchJob, config: RunConfig) -> str:
    """What was submitted and where to look."""
    ranks = job.nodes * job.ranks_per_node
    again = "; requeued when stopped" if job.requeue else ""
    return (
        f"job {number}: {ranks} ranks on {job.nodes} nodes for at most {job.time}{again}\n"
        f"log:        {Path.cwd() / job.log.replace('%j', number)}\n"
        f"run folder: {Path.cwd() / next_folder(config)} (or the next number, if another run takes it first)\n"
        f"look with:  mpidp status"
    )


def next_folder(config: RunConfig) -> Path:
    """The folder that a run of this name would get now."""
    parent, name = config.run.parent, config.run.name
    names = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
    return next(parent / name for name in names if not (parent / name).exists())
