"""Command-line words enter, an exit code leaves: 0 done, 1 failed, 2 usage, 3 unhealthy, 75 stopped early.

The top level imports nothing heavy and starts no MPI, so `mpidp --help` is instant and safe on a login node.
Under a launcher every rank parses the same words; an error is printed once, by rank 0.
"""

import difflib
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import mpidp
from mpidp.errors import ConfigError, MpidpError
from mpidp.world import signals
from mpidp.world.abort import SHARED_MARK
from mpidp.world.launch import launch_facts

if TYPE_CHECKING:
    from mpidp.options import TrainOptions
    from mpidp.tools.bench_options import AllreduceOptions, StepOptions
    from mpidp.tools.data_options import ConvertOptions, MakeOptions, VerifyOptions
    from mpidp.world.world import World

DONE, FAILED, USAGE, STOPPED_EARLY, INTERRUPTED = 0, 1, 2, 75, 130

USAGE_TEXT = """usage: mpidp COMMAND ...

Data-parallel PyTorch training over MPI, from HDF5 files.

commands:
  train RUN.toml [--SECTION.KEY=VALUE ...]   train; alone, or on every rank under mpiexec or srun
        [--resume RUN_FOLDER | auto]         continue a run from its newest checkpoint; auto: if there is one
        [--dry-run] [--ranks N]              print shards, buckets and memory for N ranks; no MPI
        [--print-config]                     print the effective configuration; no MPI
  submit RUN.toml --nodes N [OPTIONS]        write a batch script for Slurm and submit it; --dry-run prints it; no MPI
  status [RUN_FOLDER]                        how far a run is, or all in runs/, and what Slurm says of it; no MPI
  report RUN_FOLDER ... [--output FILE]      write a page about runs: curves, times, settings; no MPI
  data inspect FILE                          describe an HDF5 file as the loader sees it, with advice
  data verify FILE ... [--json]              read and decode everything; alone or on all ranks
  data convert SOURCE ... TARGET             write .npy, .npz, images, CSV or HDF5 as fast HDF5; on all cores
  data make TARGET --field=NAME:TYPE:SIZE    write synthetic data that can be learnt
  checkpoint list | verify | export RUN      look at the checkpoints of a run, check them, take the model out; no MPI
  bench allreduce [OPTIONS]                  time the mean of a buffer over the ranks, under mpiexec or srun
  bench step [OPTIONS]                       time a training step, likewise; --help lists the options
  doctor [FILE] [--probe] [--json]           what is wrong here and how to mend it; alone or under mpiexec or srun
  bench loader FILE [OPTIONS]                time reading an HDF5 file, beside other loaders; no MPI

options:
  -h, --help       show this text; mpidp train [RUN.toml] --help lists every setting
  --version        show the version

exit codes: 0 done, 1 failed, 2 usage or configuration, 3 doctor found a failure,
75 stopped early after a save, 130 interrupted"""

DATA_USAGE_TEXT = """usage: mpidp data COMMAND ...

Look at data, check it, bring it into HDF5 files that are read fast, or make some.

commands:
  inspect FILE                  datasets (shape, dtype, layout, chunks, filters, size, attributes), what the loader
                                makes of them, and advice
  verify FILE ...               read and decode every chunk and name what is wrong; alone or under mpiexec or srun
  convert SOURCE ... TARGET     write .npy, .npz, a folder of images, CSV or HDF5 as HDF5, on all cores of this node
  make TARGET --field=...       write synthetic data that can be learnt

mpidp data COMMAND --help lists the options"""

CHECKPOINT_USAGE_TEXT = """usage: mpidp checkpoint COMMAND RUN_FOLDER

Look after the checkpoints of a run: its folder, its checkpoints folder, or one checkpoint. Starts no MPI.

commands:
  list RUN_FOLDER         names, times, sizes
  verify RUN_FOLDER       compare every file with its checksum; exit code 1 names what is damaged
  export RUN_FOLDER [--output FILE] [--format torch|safetensors] [--optimizer]
                          write the model of the newest whole one as a file for other programs"""

BENCH_USAGE_TEXT = """usage: mpidp bench COMMAND [OPTIONS]

Measure on all ranks, under mpiexec or srun; every result is checked before it is timed.

commands:
  allreduce [--bytes N,N] [--reducers NAME,NAME] [--against gloo]   the mean of a buffer over the ranks
  step [--model transformer|mlp] [--reducers NAME,NAME] [--against ddp]   a training step
  loader FILE [--shuffles NAME,NAME] [--against dataloader] [--cold]      reading an HDF5 file, in one process

options of all: --repeats N, --json, --help
fair figures on CPUs need OMP_NUM_THREADS set to the cores of a rank."""

STATUS_USAGE_TEXT = """usage: mpidp status [RUN_FOLDER]

Print how far a run is (step, loss, time left, last checkpoint, restarts) and what Slurm says of its job; without a
folder, a line for each run in runs/."""

_HELP = ("-h", "--help")

DataOptions = TypeVar("DataOptions", bound="VerifyOptions | ConvertOptions | MakeOptions")


def run() -> NoReturn:
    """Run the command line of this process and exit with its code: the console script `mpidp`."""
    code = main()
    if _is_one_of_many():
        signals.ignore()
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `argv` defaults to the words after the program's name.

    An error that only this rank knows of is raised, not returned: the world's hooks then end the whole job.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words == ["--version"]:
        _say(f"mpidp {mpidp.__version__}")
        return DONE
    try:
        return _dispatch(words, _COMMANDS, "mpidp", USAGE_TEXT)
    except MpidpError as error:
        _leave_together(error)
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", []))
        _complain(f"{error}{notes}")
        return USAGE if isinstance(error, ConfigError) else FAILED
    except KeyboardInterrupt:
        if _is_one_of_many():
            raise
        _complain("interrupted")
        return INTERRUPTED


Command = Callable[[list[str]], int]


def _dispatch(words: list[str], commands: dict[str, Command], prefix: str, usage: str) -> int:
    """Answer help and version, or hand the remaining words to the command that the first word names."""
    if not words or words[0] in _HELP:
        _say(usage)
        return DONE if words else USAGE
    name, *rest = words
    if name in commands:
        return commands[name](rest)
    close = difflib.get_close_matches(name, commands, n=1)
    hint = f" Did you mean {prefix} {close[0]}?" if close else ""
    known = ", ".join(commands)
    raise ConfigError(f"unknown command {prefix} {name}.{hint} Known: {known}. See {prefix} --help.")


def _data(words: list[str]) -> int:
    commands: dict[str, Command] = {"inspect": _inspect, "verify": _verify, "convert": _convert, "make": _make}
    return _dispatch(words, commands, "mpidp data", DATA_USAGE_TEXT)


def _inspect(words: list[str]) -> int:
    if any(word in _HELP for word in words):
        _say(DATA_USAGE_TEXT)
        return DONE
    if len(words) != 1:
        raise ConfigError(f"mpidp data inspect takes one FILE; found {len(words)} words: {' '.join(words)}")
    from mpidp.tools.inspect import inspect

    _say(inspect(words[0]))
    return DONE


def _verify(words: list[str]) -> int:
    from mpidp.tools.data_options import VerifyOptions

    options = _parsed(VerifyOptions, words)
    if isinstance(options, int):
        return options
    from mpidp.tools.verify import verify_by

    text, is_sound = verify_by(options)
    _say(text)
    if not is_sound and (world := _world()) is not None:
        world.guard.remove()  # all ranks leave with this code: nobody has to be told
    return DONE if is_sound else FAILED


def _convert(words: list[str]) -> int:
    from mpidp.tools.data_options import ConvertOptions

    options = _parsed(ConvertOptions, words)
    if isinstance(options, int):
        return options
    _check_alone("convert")
    from mpidp.tools.convert_open import convert_by

    _say(convert_by(options))
    return DONE


def _make(words: list[str]) -> int:
    from mpidp.tools.data_options import MakeOptions

    options = _parsed(MakeOptions, words)
    if isinstance(options, int):
        return options
    _check_alone("make")
    from mpidp.tools.convert_open import make_by

    _say(make_by(options))
    return DONE


def _checkpoint(words: list[str]) -> int:
    if not launch_facts(os.environ).speaks:
        return DONE  # one process answers for all
    commands: dict[str, Command] = {"list": _list, "verify": _verify_checkpoints, "export": _export}
    return _dispatch(words, commands, "mpidp checkpoint", CHECKPOINT_USAGE_TEXT)


def _list(words: list[str]) -> int:
    from mpidp.tools import checkpoint_options as options
    from mpidp.tools.checkpoint import list_checkpoints

    try:
        chosen = options.parse(options.ListOptions, words)
    except SystemExit as end:
        return _parser_code(end)
    _say(list_checkpoints(chosen.place))
    return DONE


def _verify_checkpoints(words: list[str]) -> int:
    from mpidp.tools import checkpoint_options as options
    from mpidp.tools.checkpoint import verify

    try:
        chosen = options.parse(options.VerifyOptions, words)
    except SystemExit as end:
        return _parser_code(end)
    text, is_whole = verify(chosen.place)
    _say(text)
    return DONE if is_whole else FAILED


def _export(words: list[str]) -> int:
    from mpidp.tools import checkpoint_options as options
    from mpidp.tools.checkpoint_export import export

    try:
        chosen = options.parse(options.ExportOptions, words)
    except SystemExit as end:
        return _parser_code(end)
    _say(export(chosen.place, chosen.output, chosen.format, chosen.optimizer))
    return DONE


def _parsed(kind: "type[DataOptions]", words: list[str]) -> "DataOptions | int":
    """Return the options of a data command, or the exit code where the parser has printed help or an error."""
    from mpidp.tools.data_options import parse

    try:
        return parse(kind, words, console_outputs=launch_facts(os.environ).speaks)
    except SystemExit as end:
        return _parser_code(end)


def _check_alone(command: str) -> None:
    size = launch_facts(os.environ).size or 1
    if size > 1:
        raise ConfigError(
            f"mpidp data {command} spreads its work over the cores of one node by itself; start it without mpiexec "
            f"or srun, which started {size} of it, or with one task of many CPUs."
        )


def _train(words: list[str]) -> int:
    from mpidp.options import parse

    facts = launch_facts(os.environ)
    if (facts.size or 1) > 1 and not _answers_without_mpi(words):
        return _train_together(words)
    try:
        options = parse(words, console_outputs=facts.speaks)
    except SystemExit as end:
        return _parser_code(end)
    if options.print_config:
        return _print_config(options)
    if options.dry_run:
        return _dry_run(options)
    signals.watch()
    from mpidp.train.trainer import train

    return STOPPED_EARLY if train(options.config, options.resume) else DONE


def _submit(words: list[str]) -> int:
    from mpidp import options as train_options
    from mpidp.tools.submit_options import parse

    try:
        options, job, config = parse(words, lambda settings: train_options.parse(settings).config)
    except SystemExit as end:
        return _parser_code(end)
    from mpidp.tools.batch_script import render
    from mpidp.tools.submit import describe_submitted, submit

    _say(render(job).rstrip("\n") if options.dry_run else describe_submitted(submit(job), job, config))
    return DONE


def _status(words: list[str]) -> int:
    if any(word in _HELP for word in words):
        _say(STATUS_USAGE_TEXT)
        return DONE
    if len(words) > 1:
        raise ConfigError(f"mpidp status takes one RUN_FOLDER, or none; found {len(words)} words: {' '.join(words)}")
    from mpidp.tools.status import status

    _say(status(Path(words[0]) if words else None))
    return DONE


def _report(words: list[str]) -> int:
    if not launch_facts(os.environ).speaks:
        return DONE  # one process answers for all
    from mpidp.tools.report_options import parse

    try:
        options = parse(words)
    except SystemExit as end:
        return _parser_code(end)
    from mpidp.tools.report import report

    _say(report(options.runs, options.output))
    return DONE


def _train_together(words: list[str]) -> int:
    """Train as one of many ranks: a run file that a single rank cannot read must not leave the others waiting."""
    signals.watch()
    from mpidp.options import parse
    from mpidp.train.trainer import train
    from mpidp.world.leave import leave
    from mpidp.world.world import init

    world = init()
    with world.together("reading the run file and the command line"):
        try:
            options = parse(words, console_outputs=world.rank == 0)
        except SystemExit as end:  # the parser has printed what is wrong, on rank 0
            raise ConfigError(f"this cannot be used: mpidp train {' '.join(words)}") from end
    if train(options.config, options.resume):
        leave(world, STOPPED_EARLY)
    return DONE


def _answers_without_mpi(words: list[str]) -> bool:
    return any(word.replace("_", "-") in (*_HELP, "--dry-run", "--print-config") for word in words)


def _bench(words: list[str]) -> int:
    from mpidp.tools.bench_options import AllreduceOptions, StepOptions

    commands: dict[str, Command] = {
        "allreduce": partial(_measure, AllreduceOptions),
        "step": partial(_measure, StepOptions),
        "loader": _bench_loader,
    }
    return _dispatch(words, commands, "mpidp bench", BENCH_USAGE_TEXT)


def _measure(kind: "type[AllreduceOptions] | type[StepOptions]", words: list[str]) -> int:
    from mpidp.tools.bench_options import parse

    try:
        options = parse(kind, words, console_outputs=launch_facts(os.environ).speaks)
    except SystemExit as end:
        return _parser_code(end)
    from mpidp.tools.bench import bench

    _say(bench(options))
    return DONE


def _bench_loader(words: list[str]) -> int:
    from mpidp.tools.bench_options import LoaderOptions, parse

    try:
        options = parse(LoaderOptions, words)
    except SystemExit as end:
        return _parser_code(end)
    from mpidp.tools.bench_loader import bench_loader

    print(bench_loader(options))
    return DONE


def _doctor(words: list[str]) -> int:
    from mpidp.tools.doctor.doctor_options import parse

    try:
        options = parse(words)
    except SystemExit as end:
        return _parser_code(end)
    from mpidp.tools.doctor.doctor import doctor

    return doctor(options)


def _parser_code(end: SystemExit) -> int:
    """The parser has printed help (0) or what is wrong (2)."""
    return DONE if end.code in (None, 0) else USAGE


def _print_config(options: "TrainOptions") -> int:
    from mpidp.config import to_toml

    _say(to_toml(options.config).rstrip("\n"))
    return DONE


def _dry_run(options: "TrainOptions") -> int:
    facts = launch_facts(os.environ)
    if not facts.speaks:
        return DONE  # one process answers for all
    from mpidp.tools.plan import plan
    from mpidp.train.components import build_model, build_optimizer

    model = build_model(options.config)
    make_optimizer = partial(build_optimizer, options.config.optimizer)
    _say(plan(options.config, model, make_optimizer, options.ranks or facts.size or 1))
    return DONE


_COMMANDS: dict[str, Command] = {
    "train": _train,
    "data": _data,
    "submit": _submit,
    "status": _status,
    "report": _report,
    "checkpoint": _checkpoint,
    "bench": _bench,
}
_COMMANDS["doctor"] = _doctor


def _leave_together(error: MpidpError) -> None:
    """Let this rank exit by itself if every rank does; raise the error again if the others do not know it."""
    world = _world()
    if world is None:
        return
    if world.size > 1 and not getattr(error, SHARED_MARK, False):
        raise error
    world.guard.remove()  # alone, too: of a job whose last rank aborts, Open MPI with ULFM says that all went well


def _is_one_of_many() -> bool:
    world = _world()
    return world is not None and world.size > 1


def _world() -> "World | None":
    """Return this process's world if it has been started, without importing what would start MPI."""
    module = sys.modules.get("mpidp.world.world")
    return module.current() if module else None


def _say(text: str) -> None:
    if launch_facts(os.environ).speaks:
        print(text)


def _complain(text: str) -> None:
    if launch_facts(os.environ).speaks:
        print(f"mpidp: error: {text}", file=sys.stderr)
