"""`mpidp bench allreduce` and `mpidp bench step`: the measurement on all ranks, and its report as JSON or a table."""

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from mpidp.tools.bench import allreduce, step
from mpidp.tools.bench.allreduce import gloo
from mpidp.tools.bench.options import AllreduceOptions, StepOptions, parse_variant
from mpidp.tools.bench.timing import Row
from mpidp.tools.table import table
from mpidp.world.mpi import MPI
from mpidp.world.start import init


def bench(options: AllreduceOptions | StepOptions) -> str:
    """Run the benchmark on all ranks and return its report. Collective.

    Returns:
        One line of JSON, or a table. JSON has the facts of the job and `rows`: "name", "bytes", "median_s", "min_s",
        "max_s" and the benchmark's own figures; null where a figure has no meaning.

    Raises:
        ConfigError: an unknown name, before MPI is started.
        MpidpError: a side whose results are wrong, or that cannot work here.
    """
    kind = step if isinstance(options, StepOptions) else allreduce
    for name in options.reducers:
        parse_variant(name, kind.NAMES)
    world = init()
    with nullcontext() if options.against == "none" else gloo(world):
        if isinstance(options, StepOptions):
            rows = step.step_rows(options, world)
        else:
            rows = allreduce.allreduce_rows(options, world)
    device = world.device
    facts = {
        "kind": "step" if kind is step else "allreduce",
        "ranks": world.size,
        "nodes": world.num_nodes,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "mpi": " ".join(MPI.Get_library_version().splitlines()[0].strip("\0").split()),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "repeats": options.repeats,
    }
    return json.dumps({**facts, "rows": rows}) if options.json else _text(facts, rows, kind.COLUMNS)


def _text(facts: Mapping[str, Any], rows: Sequence[Row], columns: Mapping[str, tuple[str, float]]) -> str:
    """A heading and a table.

    Args:
        facts: of the job.
        rows: of the table.
        columns: header of a column -> the figure's key in a row, and what to multiply it with.
    """
    ranks, nodes, threads = (_count(facts[f"{noun}s"], noun) for noun in ("rank", "node", "thread"))
    heading = (
        f"{facts['kind']}: {ranks} on {nodes}, {facts['device']}, {threads} a rank, {facts['repeats']} repeats\n"
        f"{facts['mpi']}, torch {facts['torch']}"
    )
    cells = [[_label(row), *(_cell(row[key], factor) for key, factor in columns.values())] for row in rows]
    return f"{heading}\n{table(['name', *columns], cells)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


class _Fixed(float):
    """A number that prints with three decimals, so that a column's points stand below each other; NaN is a dash."""

    def __str__(self) -> str:
        return "-" if self != self else f"{self:.3f}"


def _cell(value: str | int | float | None, factor: float) -> object:
    if value is None:
        return _Fixed("nan")
    return _Fixed(value * factor) if isinstance(value, float) else value


def _label(row: Row) -> str:
    """The row's name, and in parentheses what "auto" chose."""
    chosen = row.get("chosen")
    return str(row["name"]) if chosen in (None, row["name"]) else f"{row['name']} ({chosen})"
