"""The measurements behind `mpidp bench allreduce` and `mpidp bench step`. Collective."""

from collections.abc import Mapping
from contextlib import nullcontext

from mpidp.tools.bench import allreduce as bench_allreduce
from mpidp.tools.bench import step as bench_step
from mpidp.tools.bench.allreduce import gloo
from mpidp.tools.bench.options import AllreduceOptions, StepOptions, parse_variant
from mpidp.tools.bench.timing import make_report
from mpidp.world.start import init

Columns = Mapping[str, tuple[str, float]]


def bench(options: AllreduceOptions | StepOptions) -> str:
    """Runs the benchmark on all ranks and returns its report: JSON in one line, or a table.

    Raises:
        ConfigError: an unknown name, before MPI is started.
        MpidpError: a side whose results are wrong, or that cannot work here.
    """
    is_step = isinstance(options, StepOptions)
    for name in options.reducers:
        parse_variant(name, bench_step.NAMES if is_step else bench_allreduce.NAMES)
    world = init()
    with nullcontext() if options.against == "none" else gloo(world):
        if isinstance(options, StepOptions):
            rows = bench_step.step_rows(options, world)
        else:
            rows = bench_allreduce.allreduce_rows(options, world)
    report = make_report("step" if is_step else "allreduce", world, options.repeats, rows)
    if options.json:
        return report.to_json()
    return report.to_text(bench_step.COLUMNS if is_step else bench_allreduce.COLUMNS)
