"""The command `mpidp doctor`: its steps in order, and its exit code.

Alone it starts MPI in a child process only; under a launcher every rank comes here, and rank 0 prints.
"""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpidp.errors import ConfigError, LaunchError
from mpidp.printable import visible
from mpidp.tools.doctor.check_mpi import check_before_start
from mpidp.tools.doctor.checks import check, check_measured
from mpidp.tools.doctor.facts import RankFacts, gather, probe_alone
from mpidp.tools.doctor.finding import Finding, Level, Report, fail, to_json, to_markdown, to_text, worst
from mpidp.tools.doctor.known_texts import read_log
from mpidp.tools.doctor.options import DoctorOptions
from mpidp.world.launch import launch_facts

if TYPE_CHECKING:
    from mpidp.world.mpi import MPI


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
    """Set whether SIGTERM ends this rank, unless it is the one that prints.

    `srun -K` sends it to all others when rank 0 leaves with 3, and would report that signal instead of the code.
    """
    if not launch_facts(os.environ).speaks:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if ends else signal.SIG_IGN)


def _read(path: str) -> list[Finding]:
    try:
        return read_log(Path(path).read_text(errors="replace"))
    except OSError as error:
        raise ConfigError(f"--log {path}: {error.strerror}; give a file with a job's output") from error


def _say_as_one_of_many(report: Report, facts: RankFacts, options: DoctorOptions) -> int:
    """Print the report of one process, where the processes of a job cannot communicate.

    The launcher's own numbers tell which process prints, and that one has the exit code.

    Some launchers end all others when the first one leaves with a code that is not 0.
    """
    return _say(report, options) if facts.launch.speaks else 0


def _say(report: Report, options: DoctorOptions) -> int:
    shape = to_json if options.json else to_markdown if options.markdown else to_text
    print(visible(shape(report)), flush=True)
    return FOUND_FAILURE if report.level is Level.FAIL else 0
