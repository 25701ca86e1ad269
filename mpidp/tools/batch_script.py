"""What a Slurm job is to have comes in, the text of its batch script goes out. Pure; like the templates in jobs/.

Every value arrives as one word, or is refused: `faults` knows what a line of a script cannot hold.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

import mpidp
from mpidp.printable import has_control

MAX_RESTARTS = 100  # against a job that would come back for ever

# Names that sites give to partitions, accounts and so on; several may be joined by commas.
_SITE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:@+=/-]*")
_SBATCH_OPTION = re.compile(r"--[a-z][a-z0-9-]*(=.*)?|-[A-Za-z]\S*")
# sbatch takes a backslash as an escape inside quotes as well, where a shell would not.
_NOT_QUOTED_BY_SBATCH = re.compile(r"""['"\\]""")


@dataclass(frozen=True)
class BatchJob:
    """One job that trains. Empty texts and zeros leave a line out.

    Attributes:
        name: Slurm's name of the job, as a run may be called.
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


def faults(job: BatchJob) -> Iterator[str]:
    """Yield what is wrong with each value that a script cannot hold as one word, or as one line of setup."""
    for key in ("partition", "account", "qos", "mpi"):
        value = getattr(job, key)
        if value and not _SITE_NAME.fullmatch(value):
            yield f"--{key}={value!r}; expected letters, digits and any of _ . , : @ + = / -, as in a name."
    for option in job.sbatch:
        if not _SBATCH_OPTION.fullmatch(option) or _NOT_QUOTED_BY_SBATCH.search(option):
            yield (
                f"--sbatch={option!r}; expected one option of sbatch without quotes and backslashes, its value behind "
                f"an equals sign, as in --sbatch=--constraint=a100."
            )
    for text in (job.name, job.python, *job.words, *job.setup, *job.sbatch):
        if has_control(text):
            yield f"{text!r} has a line break or another control character, which no line of a script can hold."


def render(job: BatchJob) -> str:
    """The batch script of a job in which `faults` finds nothing."""
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
            # Bash would run a command in the subscript of an array if the variable stood in its arithmetic.
            f'if ((code == 75 || code == 140)) && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {MAX_RESTARTS} ]; then',
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
    lines += ["--requeue" if job.requeue else "--no-requeue", *map(shlex.quote, job.sbatch)]
    return [f"#SBATCH {line}" for line in lines]
