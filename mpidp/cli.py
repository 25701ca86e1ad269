"""Command-line words enter, an exit code leaves: 0 done, 1 failed, 2 usage, 3 unhealthy, 75 stopped early.

The top level imports nothing heavy and starts no MPI, so `mpidp --help` is instant and safe on a login node.
Under a launcher every rank parses the same words; an error is printed once, by rank 0.
"""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import mpidp
from mpidp.commands import bench, checkpoint, data, runs, train
from mpidp.commands.words import (
    DONE,
    FAILED,
    INTERRUPTED,
    UNREAD,
    USAGE,
    Answered,
    Command,
    complain,
    dispatch,
    parsed,
    say,
    started_world,
)
from mpidp.errors import SHARED_MARK, ConfigError, MpidpError
from mpidp.world import signals
from mpidp.world.log import discard_output, is_unread

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
75 stopped early after a save, 130 interrupted, 141 nobody reads what it prints"""


def run() -> NoReturn:
    """Run the command line of this process and exit with its code: the console script `mpidp`."""
    if sys.argv[1:2] == ["train"]:
        signals.watch()  # the sooner, the fewer signals end a job instead of stopping it
    try:
        if sys.stdout is None:
            discard_output()
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        if not is_unread() or _is_one_of_many():
            raise  # another pipe; or the other ranks wait
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
    if words == ["--version"]:
        say(f"mpidp {mpidp.__version__}")
        return DONE
    try:
        return dispatch(words, COMMANDS, "mpidp", USAGE_TEXT)
    except Answered as answer:
        return answer.code
    except MpidpError as error:
        _leave_together(error)
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", []))
        complain(f"{error}{notes}")
        return USAGE if isinstance(error, ConfigError) else FAILED
    except KeyboardInterrupt:
        if _is_one_of_many():
            raise
        world = started_world()
        complain(f"interrupted{world.guard.last_words() if world else ''}")
        return INTERRUPTED


def _with_home(word: str) -> str:
    """A word whose "~" the shell has left, as in --resume=~/runs/digits, or quoted."""
    option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    return f"{option}{equals}{os.path.expanduser(value)}"


def _doctor(words: list[str]) -> int:
    from mpidp.tools.doctor.doctor import parse

    options = parsed(lambda: parse(words))
    from mpidp.tools.doctor.doctor import doctor

    return doctor(options)


COMMANDS: dict[str, Command] = {
    "train": train.train,
    "data": data.data,
    "submit": runs.submit,
    "status": runs.status,
    "report": runs.report,
    "checkpoint": checkpoint.checkpoint,
    "bench": bench.bench,
    "doctor": _doctor,
}


def _leave_together(error: MpidpError) -> None:
    """Let this rank exit by itself if every rank does; raise the error again if the others do not know it."""
    world = started_world()
    if world is None:
        return
    if world.size > 1 and not getattr(error, SHARED_MARK, False):
        raise error
    world.guard.remove()  # alone, too: of a job whose last rank aborts, Open MPI with ULFM says that all went well


def _is_one_of_many() -> bool:
    world = started_world()
    return world is not None and world.size > 1
