"""The command line: the table of all commands, and how one of them is run.

Exit codes: 0 done, 1 failed, 2 usage, 3 unhealthy, 75 stopped early, 130 interrupted, 141 nobody reads the output.
The top level imports nothing heavy and starts no MPI, so `mpidp --help` is instant and safe on a login node. Under a
launcher every rank parses the same words; text and errors are printed once, by rank 0.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import mpidp
from mpidp.errors import SHARED_MARK, ConfigError, MpidpError
from mpidp.printable import visible
from mpidp.world import signals
from mpidp.world.launch import current_world, launch_facts
from mpidp.world.log import discard_output, is_unread

if TYPE_CHECKING:
    from mpidp.world.world import World

DONE, FAILED, USAGE, INTERRUPTED, UNREAD = 0, 1, 2, 130, 141
_HELP = ("-h", "--help")


@dataclass(frozen=True)
class Command:
    """One command of the table.

    Attributes:
        name: the words that stand for it, after `mpidp`.
        takes: what follows them, for the list of commands.
        summary: one line for that list.
        run: module:function. It is given the options and returns a text to print, or a text and whether all is well,
            or an exit code.
        options: module:class, a dataclass that `mpidp.options` reads; empty if `run` reads the words itself.
        under_launcher: which ranks run it: "all"; "first", which answers for all; "none", since it is no job of ranks.
    """

    name: str
    takes: str
    summary: str
    run: str
    options: str = ""
    under_launcher: Literal["all", "first", "none"] = "first"


_DATA, _CHECKPOINT, _BENCH = "mpidp.tools.data", "mpidp.tools.checkpoint", "mpidp.tools.bench"
COMMANDS = (
    Command(
        "train",
        "RUN.toml [--SECTION.KEY=VALUE ...] [--resume RUN_FOLDER | auto] [--dry-run] [--print-config]",
        "train, alone or on every rank under mpiexec or srun; --dry-run and --print-config only show what would be",
        "mpidp.tools.train:train",
        under_launcher="all",
    ),
    Command(
        "predict",
        "RUN_FOLDER|RUN.toml [--data FILE ...] [--output FILE] [--checkpoint last|best|PATH]",
        "write what a trained model returns for every sample of HDF5 files; alone or on all ranks",
        "mpidp.tools.predict:predict",
        "mpidp.tools.predict:PredictOptions",
        "all",
    ),
    Command(
        "submit",
        "RUN.toml --nodes N [OPTIONS]",
        "write a batch script for Slurm and submit it; --dry-run prints it",
        "mpidp.tools.submit:submit_by",
    ),
    Command(
        "status",
        "[RUN_FOLDER]",
        "how far a run is, or all in runs/, and what Slurm says of it",
        "mpidp.tools.status:status_by",
        "mpidp.tools.status:StatusOptions",
    ),
    Command(
        "report",
        "RUN_FOLDER ... [--output FILE]",
        "write a page about runs: curves, times, settings",
        "mpidp.tools.report.report:report_by",
        "mpidp.tools.report.report:ReportOptions",
    ),
    Command(
        "data inspect",
        "FILE",
        "describe an HDF5 file as the loader sees it, with advice",
        f"{_DATA}.inspect:inspect_by",
        f"{_DATA}.options:InspectOptions",
    ),
    Command(
        "data verify",
        "FILE ... [--json]",
        "read and decode every chunk and name what is wrong; alone or on all ranks",
        f"{_DATA}.verify:verify_by",
        f"{_DATA}.options:VerifyOptions",
        "all",
    ),
    Command(
        "data convert",
        "SOURCE ... TARGET",
        "write .npy, .npz, a folder of images, CSV or HDF5 as fast HDF5, on all cores of this node",
        f"{_DATA}.convert:convert_by",
        f"{_DATA}.options:ConvertOptions",
        "none",
    ),
    Command(
        "data make",
        "TARGET --field=NAME:TYPE:SIZE",
        "write synthetic data that can be learnt",
        f"{_DATA}.convert:make_by",
        f"{_DATA}.options:MakeOptions",
        "none",
    ),
    Command(
        "checkpoint list",
        "RUN_FOLDER",
        "names, times and sizes of the checkpoints of a run",
        f"{_CHECKPOINT}:list_checkpoints",
        f"{_CHECKPOINT}:ListOptions",
    ),
    Command(
        "checkpoint verify",
        "RUN_FOLDER",
        "compare every file with its checksum; exit code 1 names what is damaged",
        f"{_CHECKPOINT}:verify",
        f"{_CHECKPOINT}:VerifyOptions",
    ),
    Command(
        "checkpoint export",
        "RUN_FOLDER [OPTIONS]",
        "write the model of the newest whole checkpoint as a file for other programs",
        f"{_CHECKPOINT}:export",
        f"{_CHECKPOINT}:ExportOptions",
    ),
    Command(
        "bench allreduce",
        "[OPTIONS]",
        "time the mean of a buffer over the ranks, under mpiexec or srun",
        f"{_BENCH}.allreduce:bench_allreduce",
        f"{_BENCH}.options:AllreduceOptions",
        "all",
    ),
    Command(
        "bench step",
        "[OPTIONS]",
        "time a training step, under mpiexec or srun",
        f"{_BENCH}.step:bench_step",
        f"{_BENCH}.options:StepOptions",
        "all",
    ),
    Command(
        "bench loader",
        "FILE [OPTIONS]",
        "time reading an HDF5 file, beside what the machine allows; one process",
        f"{_BENCH}.loader:bench_loader",
        f"{_BENCH}.options:LoaderOptions",
    ),
    Command(
        "doctor",
        "[FILE] [--probe] [--json]",
        "what is wrong here and how to fix it; alone or under mpiexec or srun",
        "mpidp.tools.doctor.doctor:doctor",
        "mpidp.tools.doctor.doctor:DoctorOptions",
        "all",
    ),
)


def run() -> NoReturn:
    """Run the command line of this process and exit with its code: the console script `mpidp`."""
    if sys.argv[1:2] == ["train"]:
        signals.watch()  # as early as possible: before this a signal ends the job instead of stopping it
    try:
        if sys.stdout is None:
            discard_output()
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        if not is_unread() or _is_one_of_many():
            raise  # of another pipe, or other ranks wait
        discard_output()
        code = UNREAD
    if _is_one_of_many():
        signals.ignore()
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `argv` defaults to the words after the program's name.

    An error that only this rank knows of is raised, not returned: the world's hooks then end the whole job.
    """
    words = [_with_home(word) for word in (sys.argv[1:] if argv is None else argv)]
    try:
        return _dispatch(words)
    except MpidpError as error:
        _raise_if_alone(error)
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", []))
        _complain(f"{error}{notes}")
        return USAGE if isinstance(error, ConfigError) else FAILED
    except KeyboardInterrupt:
        if _is_one_of_many():
            raise
        world = current_world()
        _complain(f"interrupted{world.guard.last_words() if world else ''}")
        return INTERRUPTED


def _dispatch(words: list[str]) -> int:
    """Run the command that the first words name, or raise an error that lists the commands."""
    if words == ["--version"]:
        _say(f"mpidp {mpidp.__version__}")
        return DONE
    for command in COMMANDS:
        names = command.name.split()
        if words[: len(names)] == names:
            return _run(command, words[len(names) :])
    group = words[:1] if any(command.name.startswith(f"{words[0]} ") for command in COMMANDS if words) else []
    rest = words[len(group) :]
    if not rest or rest[0] in _HELP:
        _say(_list_commands(*group))
        return DONE if rest else USAGE
    prefix = " ".join(["mpidp", *group])
    known = [command.name.split()[len(group)] for command in COMMANDS if command.name.split()[: len(group)] == group]
    import difflib

    close = difflib.get_close_matches(rest[0], known, n=1)
    hint = f" Did you mean {prefix} {close[0]}?" if close else ""
    listing = ", ".join(dict.fromkeys(known))
    raise ConfigError(f"unknown command {prefix} {rest[0]}.{hint} Known: {listing}. See {prefix} --help.")


def _run(command: Command, words: list[str]) -> int:
    from mpidp.options import HelpWanted, parse

    options: Any = words
    try:
        if command.options:
            options = parse(_load(command.options), f"mpidp {command.name}", words)
        return _answer(command, options)
    except HelpWanted as text:
        _say(str(text))
        return DONE


def _answer(command: Command, options: Any) -> int:
    """Run a command on the ranks that it is for, print what it returns, and return the exit code."""
    size = launch_facts(os.environ).size or 1
    if size > 1 and command.under_launcher == "none":
        raise ConfigError(
            f"mpidp {command.name} spreads its work over the cores of one node by itself; start it without mpiexec "
            f"or srun, which started {size} of it, or with one task of many CPUs."
        )
    if command.under_launcher == "first" and not speaks():
        return DONE  # one process prints for all
    answer: str | tuple[str, bool] | int = _load(command.run)(options)
    if isinstance(answer, int):
        return answer
    text, is_well = (answer, True) if isinstance(answer, str) else answer
    _say(text)
    return DONE if is_well else FAILED


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _list_commands(group: str = "") -> str:
    """Return the help of the top level, or of the commands that begin with one word."""
    prefix = f"mpidp {group}".strip()
    lines = [f"usage: {prefix} COMMAND ...", "", "Data-parallel PyTorch training over MPI, from HDF5 files.", ""]
    for command in COMMANDS:
        if command.name.startswith(f"{group} " if group else ""):
            lines += [f"  {command.name} {command.takes}", f"      {command.summary}"]
    lines += ["", f"{prefix} COMMAND --help lists the options of a command; mpidp --version shows the version.", ""]
    lines += ["exit codes: 0 done, 1 failed, 2 usage or configuration, 3 doctor found a failure,"]
    return "\n".join([*lines, "75 stopped early after a save, 130 interrupted, 141 nobody reads what it prints"])


def _with_home(word: str) -> str:
    """Expands a "~" that the shell has not, as in --resume=~/runs/digits, or quoted."""
    option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    return f"{option}{equals}{os.path.expanduser(value)}"


def speaks() -> bool:
    """Whether this process is the one that prints: rank 0, also after the first rank 0 has died."""
    world = current_world()
    return launch_facts(os.environ).speaks if world is None else world.rank == 0


def _say(text: str) -> None:
    """Print on the standard output, once a job."""
    if speaks():
        print(visible(text))


def _complain(text: str) -> None:
    """Print on the standard error, once a job."""
    if speaks():
        print(f"mpidp: error: {visible(text)}", file=sys.stderr)


def _raise_if_alone(error: MpidpError) -> None:
    """Raise the error again if other ranks do not know it: this rank's failure then ends the job."""
    if _is_one_of_many() and not getattr(error, SHARED_MARK, False):
        raise error


def _is_one_of_many() -> bool:
    world: World | None = current_world()
    return world is not None and world.size > 1
