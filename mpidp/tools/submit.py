"""`mpidp submit`: writes and submits a batch script for Slurm that trains, without torch or MPI.

Every value arrives in the script as one word, or is refused: `_faults` knows what a line of a script cannot hold.
"""

import itertools
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import mpidp
from mpidp.config import RunConfig
from mpidp.errors import ConfigError, LaunchError
from mpidp.options import HELP, Arg, parse_known
from mpidp.printable import has_control
from mpidp.tools.train import read_options

MAX_RESTARTS = 100  # so that a failing job is not requeued for ever

# Names that sites give to partitions, accounts and so on; several may be joined by commas.
_SITE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:@+=/-]*")
_SBATCH_OPTION = re.compile(r"--[a-z][a-z0-9-]*(=.*)?|-[A-Za-z]\S*")
# sbatch takes a backslash as an escape inside quotes as well, where a shell would not.
_NOT_QUOTED_BY_SBATCH = re.compile(r"""['"\\]""")
# Minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on, as sbatch has them.
_TIME = re.compile(r"[0-9]+(:[0-9]{2}){0,2}|[0-9]+-[0-9]+(:[0-9]{2}){0,2}")
_EARLY_S = 60  # Slurm may send a signal so much earlier than asked for


@dataclass(frozen=True)
class SubmitOptions:
    """Write a batch script for Slurm and submit it: mpidp submit RUN.toml [OPTIONS] [--SECTION.KEY=VALUE ...].

    Settings of the run, and --resume, are those of mpidp train.
    """

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
    setup: Annotated[tuple[str, ...], Arg("LINE", append=True)] = ()
    """A line of shell before training, such as "module load openmpi"; may be given several times."""
    sbatch: Annotated[tuple[str, ...], Arg("OPTION", append=True)] = ()
    """One more option of sbatch, as in --sbatch=--constraint=a100; may be given several times."""
    dry_run: bool = False
    """Print the script instead of submitting it."""


@dataclass(frozen=True)
class BatchJob:
    """One job that trains.

    Attributes:
        options: what it is to have. Empty texts and zeros leave a line out.
        name: Slurm's name of the job, as a run may be called.
        words: what `mpidp train` is given: run file and settings.
        python: the interpreter that has mpidp.
    """

    options: SubmitOptions
    name: str
    words: tuple[str, ...]
    python: str = "python"

    @property
    def ranks_per_node(self) -> int:
        """Ranks of a node; one a GPU by default."""
        return self.options.ranks_per_node or self.options.gpus_per_node

    @property
    def log(self) -> str:
        """Name of the job's log; %j is its number."""
        return f"slurm-{self.name}-%j.out"


def submit_by(words: Sequence[str]) -> str:
    """Submit the job that the words after `mpidp submit` ask for, or return its script; as `read_job` and `submit`."""
    job, config = read_job(words)
    return render(job).rstrip("\n") if job.options.dry_run else _describe(submit(job), job, config)


def read_job(words: Sequence[str]) -> tuple[BatchJob, RunConfig]:
    """Read the words after `mpidp submit`; what is no option of it is for `mpidp train`.

    Raises:
        ConfigError: a run file or value that cannot be used; all faults of the job in one error.
        HelpWanted: -h or --help is among the words.
    """
    has_file = bool(words) and not words[0].startswith("-")
    if not has_file and not set(HELP) & set(words):
        raise ConfigError("mpidp submit takes a run file first: mpidp submit RUN.toml [OPTIONS]")
    file = words[0] if has_file else "RUN.toml"
    options, settings = parse_known(SubmitOptions, f"mpidp submit {file}", words[has_file:])
    config = read_options((file, *settings)).config
    job = BatchJob(options, config.run.name, (file, *settings), sys.executable)
    if faults := list(_faults(job)):
        raise ConfigError("\n  ".join(faults))
    return job, config


def _faults(job: BatchJob) -> Iterator[str]:
    """Yield what is wrong with each value that is invalid, or that a script cannot hold as one word."""
    options = job.options
    for key in ("nodes", "gpus_per_node", "ranks_per_node", "cpus_per_task", "signal_s"):
        least = 1 if key == "nodes" else 0
        if getattr(options, key) < least:
            option = key.replace("_", "-")
            yield f"--{option}={getattr(options, key)}; expected an integer of at least {least}."
    if not job.ranks_per_node:
        yield "how many ranks has a node? Give --gpus-per-node (a rank for each) or --ranks-per-node."
    if not _TIME.fullmatch(options.time):
        yield f"--time={options.time}; expected minutes, hours:minutes:seconds or days-hours, as in 4:00:00."
    elif options.signal_s and 0 < _seconds(options.time) <= options.signal_s + _EARLY_S:  # 0: no limit
        yield (
            f"--signal-s={options.signal_s} with --time={options.time}: ranks could be told to stop as soon as they "
            f"start, as Slurm tells them up to {_EARLY_S} s early. Give more time, or 0 for no warning."
        )
    for key in ("partition", "account", "qos", "mpi"):
        value = getattr(options, key)
        if value and not _SITE_NAME.fullmatch(value):
            yield f"--{key}={value!r}; expected letters, digits and any of _ . , : @ + = / -, as in a name."
    for option in options.sbatch:
        if not _SBATCH_OPTION.fullmatch(option) or _NOT_QUOTED_BY_SBATCH.search(option):
            yield (
                f"--sbatch={option!r}; expected one option of sbatch without quotes and backslashes, its value behind "
                f"an equals sign, as in --sbatch=--constraint=a100."
            )
    for text in (job.name, job.python, *job.words, *options.setup, *options.sbatch):
        if has_control(text):
            yield f"{text!r} has a line break or another control character, which no line of a script can hold."


def _seconds(time: str) -> int:
    """A time limit as sbatch has it, in seconds."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not dash and len(parts) < 3:  # minutes, minutes:seconds
        parts.insert(0, 0)
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def render(job: BatchJob) -> str:
    """The batch script of a job."""
    options = job.options
    parts = ["#!/bin/bash", f"# Written by mpidp submit, version {mpidp.__version__}.", *_directives(job), ""]
    parts += ["set -euo pipefail", *options.setup, ""]
    parts += ["# srun does not take over the job's cores a task by itself, and each rank keeps to its own cores."]
    if options.cpus_per_task:
        parts += ["export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"]
    parts += ["export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}", ""]
    parts += ["# -K ends all ranks when one fails. Without GPU binding every rank sees all GPUs, and takes its own."]
    parts += ["code=0"]
    train = shlex.join([job.python, "-m", "mpidp", "train", *job.words])
    parts += [f"srun -K --mpi={shlex.quote(options.mpi)} {train} || code=$?"]
    parts += ['echo "mpidp ended with exit code $code after ${SLURM_RESTART_COUNT:-0} restarts"']
    if options.requeue:
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
    options = job.options
    values = {
        "job-name": job.name,
        "output": job.log,
        "nodes": options.nodes,
        "ntasks-per-node": job.ranks_per_node,
        "gpus-per-node": options.gpus_per_node,
        "cpus-per-task": options.cpus_per_task,
        "time": options.time,
        "signal": f"USR2@{options.signal_s}" if options.signal_s else "",
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "open-mode": "append" if options.requeue else "",
    }
    lines = [f"--{name}={shlex.quote(str(value))}" for name, value in values.items() if value]
    lines += ["--requeue" if options.requeue else "--no-requeue", *map(shlex.quote, options.sbatch)]
    return [f"#SBATCH {line}" for line in lines]


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


def _describe(number: str, job: BatchJob, config: RunConfig) -> str:
    """A text about the submitted job: its number, and where its log and run folder are."""
    options = job.options
    ranks = options.nodes * job.ranks_per_node
    again = "; requeued when stopped" if options.requeue else ""
    return (
        f"job {number}: {ranks} ranks on {options.nodes} nodes for at most {options.time}{again}\n"
        f"log:        {Path.cwd() / job.log.replace('%j', number)}\n"
        f"run folder: {Path.cwd() / next_folder(config)} (or the next number, if another run takes it first)\n"
        f"look with:  mpidp status"
    )


def next_folder(config: RunConfig) -> Path:
    """The folder that a run of this name would get now."""
    parent, name = config.run.parent, config.run.name
    names = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
    return next(parent / name for name in names if not (parent / name).exists())
