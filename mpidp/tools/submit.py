"""`mpidp submit`: a batch script for Slurm that trains, written and submitted without torch or MPI.

Every value arrives in the script as one word, or is refused: `faults` knows what a line of a script cannot hold.
"""

import dataclasses
import itertools
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

import mpidp
from mpidp.config import RunConfig
from mpidp.errors import ConfigError, LaunchError
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


# Minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on, as sbatch has them.
_TIME = re.compile(r"[0-9]+(:[0-9]{2}){0,2}|[0-9]+-[0-9]+(:[0-9]{2}){0,2}")
_EARLY_S = 60  # so much earlier than asked for may Slurm send a signal

DESCRIPTION = """Write a batch script for Slurm and submit it: mpidp submit RUN.toml [OPTIONS] [--SECTION.KEY=VALUE ...]

Settings of the run, and --resume, are those of mpidp train."""


@dataclasses.dataclass(frozen=True)
class SubmitOptions:
    """What the job is to have."""

    nodes: int = 1
    """Nodes of the job."""
    gpus_per_node: int = 0
    """GPUs of a node; one rank is started for each."""
    ranks_per_node: int = 0
    """Ranks of a node; 0 for one a GPU."""
    cpus_per_task: int = 0
    """Cores of a rank; 0 for what the site gives."""
    time: str = "01:00:00"
    """Longest time of one start, as sbatch has it."""
    partition: str = ""
    """Partition; empty for the site's default."""
    account: str = ""
    """Account; empty for your default."""
    qos: str = ""
    """Quality of service; empty for your default."""
    requeue: bool = False
    """Wait in the queue again when preempted or at the time limit, and go on there."""
    signal_s: int = 120
    """Seconds before the time limit at which all ranks save and stop; 0 for no warning."""
    mpi: str = "pmi2"
    """How srun starts MPI: pmi2 for MPICH and Intel MPI, pmix for Open MPI, cray_shasta; see srun --mpi=list."""
    setup: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A line of shell before training, such as "module load openmpi"; may be given several times."""
    sbatch: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """One more option of sbatch, as in --sbatch=--constraint=a100; may be given several times."""
    dry_run: bool = False
    """Print the script instead of submitting it."""


def parse(
    words: Sequence[str], read_run: Callable[[Sequence[str]], RunConfig]
) -> tuple[SubmitOptions, BatchJob, RunConfig]:
    """Read the words after `mpidp submit`; what is no option of it is handed to `read_run`, as `mpidp train` has it.

    Raises:
        ConfigError: a run file or value that cannot be used.
        SystemExit: 0 after help, 2 after an error that the parser has printed.
    """
    if not words or words[0].startswith("-"):
        file, rest = "RUN.toml", list(words)
        if not {"-h", "--help"} & set(words):
            raise ConfigError("mpidp submit takes a run file first: mpidp submit RUN.toml [OPTIONS]")
    else:
        file, rest = words[0], list(words[1:])
    submit, settings = tyro.cli(
        SubmitOptions,
        prog=f"mpidp submit {file}",
        description=DESCRIPTION,
        args=rest,
        return_unknown_args=True,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    train_words = (file, *settings)
    config = read_run(train_words)
    job = BatchJob(
        name=config.run.name,
        words=train_words,
        ranks_per_node=submit.ranks_per_node or submit.gpus_per_node,
        python=sys.executable,
        **{key: value for key, value in vars(submit).items() if key not in ("ranks_per_node", "dry_run")},
    )
    _check(submit, job)
    return submit, job, config


def _seconds(time: str) -> int:
    """A time limit as sbatch has it, in seconds."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not dash and len(parts) < 3:  # minutes, minutes:seconds
        parts.insert(0, 0)
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _check(submit: SubmitOptions, job: BatchJob) -> None:
    """Raise one `ConfigError` that lists all faults."""
    wrong = []
    for key, least in (
        ("nodes", 1),
        ("gpus_per_node", 0),
        ("ranks_per_node", 0),
        ("cpus_per_task", 0),
        ("signal_s", 0),
    ):
        value = getattr(submit, key)
        if value < least:
            wrong.append(f"--{key.replace('_', '-')}={value}; expected an integer of at least {least}.")
    if not submit.ranks_per_node and not submit.gpus_per_node:
        wrong.append("how many ranks has a node? Give --gpus-per-node (a rank for each) or --ranks-per-node.")
    if not _TIME.fullmatch(submit.time):
        wrong.append(f"--time={submit.time}; expected minutes, hours:minutes:seconds or days-hours, as in 4:00:00.")
    elif submit.signal_s and 0 < _seconds(submit.time) <= submit.signal_s + _EARLY_S:  # 0: no limit
        wrong.append(
            f"--signal-s={submit.signal_s} with --time={submit.time}: ranks could be told to stop as soon as they "
            f"start, as Slurm tells them up to {_EARLY_S} s early. Give more time, or 0 for no warning."
        )
    wrong += faults(job)
    if wrong:
        raise ConfigError("\n  ".join(wrong))


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
