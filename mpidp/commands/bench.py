"""`mpidp bench`: reductions, training steps, loaders."""

from functools import partial
from typing import TYPE_CHECKING

from mpidp.commands.words import DONE, Command, dispatch, parsed, say, speaks

if TYPE_CHECKING:
    from mpidp.tools.bench.options import AllreduceOptions, StepOptions

USAGE_TEXT = """usage: mpidp bench COMMAND [OPTIONS]

Measure on all ranks, under mpiexec or srun; every result is checked before it is timed.

commands:
  allreduce [--bytes N,N] [--reducers NAME,NAME] [--against gloo]   the mean of a buffer over the ranks
  step [--model transformer|mlp] [--reducers NAME,NAME] [--against ddp]   a training step
  loader FILE [--shuffles NAME,NAME] [--against dataloader] [--cold]      reading an HDF5 file, in one process

options of all: --repeats N, --json, --help
fair figures on CPUs need OMP_NUM_THREADS set to the cores of a rank."""


def bench(words: list[str]) -> int:
    """Run one of them."""
    from mpidp.tools.bench.options import AllreduceOptions, StepOptions

    commands: dict[str, Command] = {
        "allreduce": partial(_measure, AllreduceOptions),
        "step": partial(_measure, StepOptions),
        "loader": _loader,
    }
    return dispatch(words, commands, "mpidp bench", USAGE_TEXT)


def _measure(kind: "type[AllreduceOptions] | type[StepOptions]", words: list[str]) -> int:
    from mpidp.tools.bench.options import parse

    options = parsed(lambda: parse(kind, words, console_outputs=speaks()))
    from mpidp.tools.bench.bench import bench

    say(bench(options))
    return DONE


def _loader(words: list[str]) -> int:
    from mpidp.tools.bench.options import LoaderOptions, parse

    options = parsed(lambda: parse(LoaderOptions, words))
    from mpidp.tools.bench.loader import bench_loader

    say(bench_loader(options))
    return DONE
