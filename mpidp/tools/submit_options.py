"""The words after `mpidp submit` enter, a `BatchJob` and the run's configuration leave. Needs neither torch nor MPI."""

import dataclasses
import re
import sys
from collections.abc import Callable, Sequence

import tyro

from mpidp.config import RunConfig
from mpidp.errors import ConfigError
from mpidp.tools.batch_script import BatchJob
from mpidp.tools.batch_script import faults as faults_of

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
    faults = []
    for key, least in (
        ("nodes", 1),
        ("gpus_per_node", 0),
        ("ranks_per_node", 0),
        ("cpus_per_task", 0),
        ("signal_s", 0),
    ):
        value = getattr(submit, key)
        if value < least:
            faults.append(f"--{key.replace('_', '-')}={value}; expected an integer of at least {least}.")
    if not submit.ranks_per_node and not submit.gpus_per_node:
        faults.append("how many ranks has a node? Give --gpus-per-node (a rank for each) or --ranks-per-node.")
    if not _TIME.fullmatch(submit.time):
        faults.append(f"--time={submit.time}; expected minutes, hours:minutes:seconds or days-hours, as in 4:00:00.")
    elif submit.signal_s and 0 < _seconds(submit.time) <= submit.signal_s + _EARLY_S:  # 0: no limit
        faults.append(
            f"--signal-s={submit.signal_s} with --time={submit.time}: ranks could be told to stop as soon as they "
            f"start, as Slurm tells them up to {_EARLY_S} s early. Give more time, or 0 for no warning."
        )
    faults += faults_of(job)
    if faults:
        raise ConfigError("\n  ".join(faults))
