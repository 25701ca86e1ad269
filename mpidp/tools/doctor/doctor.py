"""The command `mpidp doctor`: its options, its steps in order, all checks of a job, and its exit code.

Alone it starts MPI in a child process only; under a launcher every rank comes here, and rank 0 prints.
"""

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mpidp.errors import ConfigError, LaunchError
from mpidp.options import Arg
from mpidp.printable import visible
from mpidp.tools.doctor.check_machine import (
    check_cores,
    check_data,
    check_gpus,
    check_memory,
    check_node,
    check_shared,
    check_sharing,
)
from mpidp.tools.doctor.check_mpi import check_before_start, check_launch, check_mpi, check_versions
from mpidp.tools.doctor.facts import RankFacts, gather, probe_alone
from mpidp.tools.doctor.finding import (
    Finding,
    Level,
    Report,
    fail,
    merge,
    ok,
    to_json,
    to_markdown,
    to_text,
    warn,
    worst,
)
from mpidp.tools.doctor.known_texts import read_log
from mpidp.tools.table import size_text
from mpidp.world.launch import launch_facts

if TYPE_CHECKING:
    from mpidp.world.mpi import MPI


@dataclass(frozen=True)
class DoctorOptions:
    """Look at this machine, this installation and this job, and say what is wrong and how to fix it.

    Alone, or on all ranks under mpiexec or srun, which are then compared. Alone it starts MPI in a child process only.
    Exit code 3 when something FAILs.
    """

    file: Annotated[str, Arg("[FILE]", positional=True)] = ""
    """An HDF5 file that training would read."""
    probe: bool = False
    """Also measure copies and an Allreduce, train a step, write and read a checkpoint, and prove by value whether MPI
    takes GPU memory."""
    json: bool = False
    """Print one line of JSON."""
    markdown: bool = False
    """Print what an issue report needs."""
    log: Annotated[str, Arg("FILE")] = ""
    """Say what known texts in a job's output mean; only that."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for options that exclude each other."""
        if self.json and self.markdown:
            raise ConfigError("--json and --markdown both say how to print; give one of them.")


# Files that one node writes and another reads look older or newer than they are from here on.
LARGE_SKEW_S = 1.0
# Allreduce moves every byte a few times; on one node anything slower than this goes by a way that it should not.
SLOW_ALLREDUCE, SLOW_STEP = 50.0, 5.0

OF_A_RANK: tuple[Callable[[RankFacts], Iterator[Finding]], ...] = (
    check_versions,
    check_launch,
    check_mpi,
    check_node,
    check_cores,
    check_memory,
    check_gpus,
    check_data,
)


def check(job: Sequence[RankFacts], offsets_s: Sequence[float] = ()) -> list[Finding]:
    """Run all checks.

    Args:
        job: facts, indexed by rank.
        offsets_s: seconds by which each node's clock is ahead of the first one's.
    """
    by_rank = [[finding for look in OF_A_RANK for finding in look(facts)] for facts in job]
    places = [f"rank {rank} on {facts.system.host}" for rank, facts in enumerate(job)]
    together = [finding for look in (check_same, check_sharing, check_shared) for finding in look(job)]
    hosts = list(dict.fromkeys(facts.system.host for facts in job))
    return [*merge(by_rank, places), *together, *check_clocks(hosts, offsets_s)]


def check_same(job: Sequence[RankFacts]) -> Iterator[Finding]:
    """Versions and libraries that must be the same everywhere."""
    for name in ("mpidp", "torch", "mpi4py", "numpy", "h5py"):
        text = _differ(job, [str(facts.versions.packages.get(name)) for facts in job])
        if text is not None:
            yield fail("job.versions", f"{name} differs: {text}", "use one environment on all nodes")
    text = _differ(job, [facts.mpi.name if facts.mpi else "none" for facts in job])
    if text is not None:
        yield fail("job.mpi", f"the MPI library differs: {text}", "load the same module on all nodes")
    text = _differ(job, [facts.environment.get("OMP_NUM_THREADS", "not set") for facts in job])
    if text is not None:
        yield warn("job.threads", f"OMP_NUM_THREADS differs: {text}", "export it before srun or mpiexec")


def _differ(job: Sequence[RankFacts], values: Sequence[str]) -> str | None:
    """The first value that is not rank 0's, with both places; None when all are equal."""
    for rank, value in enumerate(values):
        if value != values[0]:
            hosts = [job[index].system.host for index in (0, rank)]
            return f"{values[0]} on rank 0 ({hosts[0]}), {value} on rank {rank} ({hosts[1]})"
    return None


def check_clocks(hosts: Sequence[str], offsets_s: Sequence[float]) -> Iterator[Finding]:
    """Clocks of nodes, as seconds ahead of the first; nothing where there is one node."""
    if len(offsets_s) < 2:
        return
    worst = max(range(len(offsets_s)), key=lambda node: abs(offsets_s[node]))
    text = f"the clock of {hosts[worst]} differs from that of {hosts[0]} by {offsets_s[worst]:+.3f} s"
    if abs(offsets_s[worst]) < LARGE_SKEW_S:
        yield ok("job.clocks", f"{text}; other nodes differ less")
    else:
        yield warn("job.clocks", f"{text}: times in their logs cannot be compared", "let the nodes run chrony or ntpd")


def check_measured(measured: Mapping[str, Any], num_nodes: int) -> Iterator[Finding]:
    """Compare what `--probe` measured with a copy in the same run.

    Across nodes the speed of the network is not known, so that a reduction or a step is named but not judged.
    """
    if "error" in measured:
        text = f"the probe failed: {measured['error']}"
        yield fail("probe", text, "fix that first; mpidp train would stop at the same place")
        return
    ms = {name: f"{measured[name] * 1e3:.1f} ms" for name in ("copy_s", "allreduce_s", "step_s", "plain_step_s")}
    copy = f"a copy of {size_text(measured['num_bytes'])} takes {ms['copy_s']}"
    copies, ratio = measured["allreduce_s"] / measured["copy_s"], measured["step_s"] / measured["plain_step_s"]
    text = f"right values; {copy}, MPI's Allreduce {ms['allreduce_s']} ({copies:.1f} copies)"
    if measured["ranks"] == 1:
        yield ok("probe.copy", f"{copy}; one rank reduces nothing")
    elif num_nodes == 1 and copies > SLOW_ALLREDUCE:
        fix = "look at cores.* and node.copies above; export OMPI_MCA_mpi_yield_when_idle=1 with more ranks than cores"
        yield warn("probe.reduction", text + ": slow for one node", fix)
    else:
        yield ok("probe.reduction", text)
    without = f"without mpidp {ms['plain_step_s']} ({ratio:.2f} times)"
    text = f"a training step takes {ms['step_s']} on {measured['device']}, {without}"
    if num_nodes == 1 and ratio > SLOW_STEP:
        fix = "mpidp bench step --reducers null,naive,flat,node shows which part takes the time"
        yield warn("probe.step", text, fix)
    else:
        yield ok("probe.step", text)
    yield ok(
        "probe.checkpoint",
        f"{size_text(measured['checkpoint_bytes'])} written and flushed in {measured['save_s'] * 1e3:.0f} ms, checked "
        f"and loaded in {measured['load_s'] * 1e3:.0f} ms, the same values on all ranks",
    )
    if measured["device"].startswith("cuda"):
        takes = "takes" if measured["cuda_aware"] else "does not take"
        yield ok("probe.gpu_memory", f"MPI {takes} GPU memory: {measured['aware_reason']}")


FOUND_FAILURE = 3


def doctor(options: DoctorOptions) -> int:
    """Run all checks, print a report, and return the exit code: 0, or 3 for a failure. Collective under a launcher."""
    if options.log:
        return _say(Report(_read(options.log)), options)
    _end_at_sigterm(False)
    facts = gather(options.file)
    if facts.launch.launcher == "none":
        return _say(_alone(facts, options.probe), options)
    facts, stops = _before_start(facts)
    if stops is not None:
        return _say_as_one_of_many(Report([*check([facts]), stops], [facts]), facts, options)
    return _on_ranks(facts, options)


def _alone(facts: RankFacts, probe: bool) -> Report:
    findings = check([facts])
    measured: dict[str, Any] | None = None
    if probe and worst(findings) is not Level.FAIL:
        measured = probe_alone()
        findings += check_measured(measured, 1)
    return Report(findings, [facts], measured)


def _before_start(facts: RankFacts) -> tuple[RankFacts, Finding | None]:
    """Load the MPI library without starting it; and return the reason why it must not be started, or None."""
    try:
        from mpidp.world.library import describe
    except (ImportError, LaunchError) as error:
        return facts, fail("mpi", str(error), "install mpi4py, and load the site's MPI module or pip install mpich")
    library = describe()
    return replace(facts, mpi=library), check_before_start(facts.launch, os.environ, library.text)


def _on_ranks(facts: RankFacts, options: DoctorOptions) -> int:
    from mpidp.world.clock import clock_offsets
    from mpidp.world.exit import start_guarded
    from mpidp.world.library import describe

    _end_at_sigterm(True)  # starting MPI may wait for ever
    comm = start_guarded()
    _end_at_sigterm(False)
    facts = replace(facts, mpi=describe())
    if facts.launch.size not in (None, comm.size):  # MPI has not understood the launcher, and every process is alone
        return _say_as_one_of_many(Report(check([facts]), [facts]), facts, options)
    job, offsets_s = comm.gather(facts, root=0), clock_offsets(comm)
    findings = check(job, offsets_s) if job else []
    measured = _measure(comm, findings) if options.probe else None
    code = 0
    if job:
        findings += check_measured(measured, len({facts.system.host for facts in job})) if measured else []
        code = _say(Report(findings, job, measured), options)
    code = comm.bcast(code, root=0)
    # A code that is not 0 comes from one rank only: some launchers call it a crash if it comes from many.
    return code if comm.rank == 0 else 0


def _measure(comm: "MPI.Intracomm", findings: list[Finding]) -> dict[str, Any] | None:
    """Measure on all ranks, unless something fails already. Collective."""
    if comm.bcast(worst(findings), root=0) is Level.FAIL:
        return None
    from mpidp.tools.doctor.probe import probe

    return probe()


def _end_at_sigterm(ends: bool) -> None:
    """Set whether SIGTERM ends this rank: `srun -K` sends it when rank 0 exits with 3, and would report the signal."""
    if not launch_facts(os.environ).speaks:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if ends else signal.SIG_IGN)


def _read(path: str) -> list[Finding]:
    try:
        return read_log(Path(path).read_text(errors="replace"))
    except OSError as error:
        raise ConfigError(f"--log {path}: {error.strerror}; give a file with a job's output") from error


def _say_as_one_of_many(report: Report, facts: RankFacts, options: DoctorOptions) -> int:
    """Print the report where processes cannot communicate: only the launcher's rank 0 prints and returns a failure."""
    return _say(report, options) if facts.launch.speaks else 0


def _say(report: Report, options: DoctorOptions) -> int:
    shape = to_json if options.json else to_markdown if options.markdown else to_text
    print(visible(shape(report)), flush=True)
    return FOUND_FAILURE if report.level is Level.FAIL else 0
