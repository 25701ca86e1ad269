"""What a Slurm job is to have comes in, the text of its batch script goes out. Pure; like the templates in jobs/."""

import shlex
from dataclasses import dataclass

import mpidp

MAX_RESTARTS = 100  # against a job that would come back for ever


@dataclass(frozen=True)
class BatchJob:
    """One job that trains. Empty texts and zeros leave a line out.

    Attributes:
        name: Slurm's name of the job.
        words: what `mpidp train` is given: run file and settings.
        nodes, ranks_per_node, gpus_per_node, cpus_per_task: its size.
        time: the time limit, as Slurm writes it.
        partition, account, qos: where it runs and who pays.
        signal_s: seconds before the time limit at which all ranks are told to save and stop.
        requeue: whether it waits in the queue again after it was stopped.
        mpi: value of `srun --mpi`.
        python: the interpreter that has mpidp.
        setup: lines of shell before training, such as `module load`.
        sbatch: more options of sbatch.
    """

    name: str
    words: tuple[str, ...]
    nodes: int
    ranks_per_node: int
    time: str
    gpus_per_node: int = 0
    cpus_per_task: int = 0
    partition: str = ""
    account: str = ""
    qos: str = ""
    signal_s: int = 120
    requeue: bool = False
    mpi: str = "pmi2"
    python: str = "python"
    setup: tuple[str, ...] = ()
    sbatch: tuple[str, ...] = ()

    @property
    def log(self) -> str:
        """Name of the job's log; %j is its number."""
        return f"slurm-{self.name}-%j.out"


def render(job: BatchJob) -> str:
    """The batch script."""
    parts = ["#!/bin/bash", f"# Written by mpidp submit, version {mpidp.__version__}.", *_directives(job), ""]
    parts += ["set -euo pipefail", *job.setup, ""]
    parts += ["# srun does not take over the job's cores a task by itself, and each rank keeps to its own cores."]
    if job.cpus_per_task:
        parts += ["export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"]
    parts += ["export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}", ""]
    parts += ["# -K ends all ranks when one fails. Without GPU binding every rank sees all GPUs, and takes its own."]
    parts += ["code=0"]
    train = shlex.join([job.python, "-m", "mpidp", "train", *job.words])
    parts += [f"srun -K --mpi={shlex.quote(job.mpi)} {train} || code=$?"]
    parts += ['echo "mpidp ended with exit code $code after ${SLURM_RESTART_COUNT:-0} restarts"']
    if job.requeue:
        parts += [
            "",
            "# 75: stopped early, everything saved. 140: SIGUSR2 came so early that Python was not there to hear it.",
            "# The next start continues this job's own run.",
            f"if (((code == 75 || code == 140) && ${{SLURM_RESTART_COUNT:-0}} < {MAX_RESTARTS})); then",
            '  scontrol requeue "$SLURM_JOB_ID"',
            "fi",
        ]
    return "\n".join([*parts, 'exit "$code"']) + "\n"


def _directives(job: BatchJob) -> list[str]:
    """The #SBATCH lines. sbatch reads their values as a shell would read words."""
    options: list[tuple[str, object]] = [
        ("job-name", job.name),
        ("output", job.log),
        ("nodes", job.nodes),
        ("ntasks-per-node", job.ranks_per_node),
        ("gpus-per-node", job.gpus_per_node),
        ("cpus-per-task", job.cpus_per_task),
        ("time", job.time),
        ("signal", f"USR2@{job.signal_s}" if job.signal_s else ""),
        ("partition", job.partition),
        ("account", job.account),
        ("qos", job.qos),
        ("open-mode", "append" if job.requeue else ""),
    ]
    lines = [f"--{name}={shlex.quote(str(value))}" for name, value in options if value]
    lines += ["--requeue" if job.requeue else "--no-requeue", *job.sbatch]
    return [f"#SBATCH {line}" for line in lines]
