"""Times of alternatives that take turns, each after a check that its result is right; and their report."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from mpidp.tools.bench.options import AllreduceOptions, StepOptions
from mpidp.tools.table import table
from mpidp.world.mpi import MPI
from mpidp.world.world import World

Row = dict[str, str | int | float | None]

# The first call of a kind allocates and connects, and a mistake in what it leaves behind shows only in the second.
CHECKED_CALLS = 2


@dataclass(frozen=True)
class Side:
    """One competitor.

    Attributes:
        name: its row in the table.
        prepare: not timed; writes fresh values, as the backward pass does before a reduction.
        run: what is timed; collective, and safe to call again without `prepare`.
        check: after `prepare` and one `run`; raises MpidpError when the result is wrong.
        calls: how often a repeat calls `run`; its time is that of one call.
        meter: a count of seconds that `run` increases, read before and after it.
    """

    name: str
    prepare: Callable[[], None]
    run: Callable[[], object]
    check: Callable[[], None]
    calls: int = 1
    meter: Callable[[], float] = lambda: 0.0


@dataclass(frozen=True)
class Times:
    """Seconds of each repeat, the maximum over ranks: of one call, and what the side's meter counted in it."""

    seconds: list[float]
    metered_s: list[float]

    def summary(self) -> dict[str, float]:
        """Median, minimum and maximum."""
        return {"median_s": median(self.seconds), "min_s": min(self.seconds), "max_s": max(self.seconds)}


def measure(world: World, sides: Sequence[Side], repeats: int) -> dict[str, Times]:
    """Checks every side, then times all of them. Collective.

    The sides take turns (A B C A B C ...), so that a machine that is busy for a while slows all alike. A repeat
    starts when all ranks have passed a barrier and counts as long as its slowest rank.

    Raises:
        MpidpError: a side's result is wrong on some rank; raised on all, before anything is timed.
    """
    for side in sides:
        for _ in range(CHECKED_CALLS):
            side.prepare()
            side.run()
            with world.raise_on_all_ranks(f"checking {side.name}"):
                side.check()
    seconds = torch.zeros(len(sides), 2, repeats, dtype=torch.float64)
    for repeat in range(repeats):
        for index, side in enumerate(sides):
            seconds[index, 0, repeat], seconds[index, 1, repeat] = _time(world, side)
    world.comm.Allreduce(MPI.IN_PLACE, seconds.numpy(), op=MPI.MAX)
    return {side.name: Times(*seconds[index].tolist()) for index, side in enumerate(sides)}


def _time(world: World, side: Side) -> tuple[float, float]:
    """Seconds of one call on this rank, and those that the side's meter counted."""
    side.prepare()
    _finish(world.device)
    metered = side.meter()
    world.comm.Barrier()  # not world.barrier(): its sleeps would let the ranks start up to half a millisecond apart
    start = time.perf_counter()
    for _ in range(side.calls):
        side.run()
    _finish(world.device)
    elapsed = time.perf_counter() - start
    return elapsed / side.calls, (side.meter() - metered) / side.calls


def _finish(device: torch.device) -> None:
    """Waits for what is queued on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def report(
    kind: str,
    options: AllreduceOptions | StepOptions,
    world: World,
    rows: Sequence[Row],
    columns: Mapping[str, tuple[str, float]],
) -> str:
    """Return one line of JSON, with the facts of the job and `rows`, or a table.

    Args:
        kind: the name of the benchmark.
        options: as given on the command line.
        world: the ranks.
        rows: what was measured; None where a figure has no meaning.
        columns: header of a column of the table -> the figure's key in a row, and what to multiply it with.
    """
    device = world.device
    facts = {
        "kind": kind,
        "ranks": world.size,
        "nodes": world.num_nodes,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "mpi": " ".join(MPI.Get_library_version().splitlines()[0].strip("\0").split()),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "repeats": options.repeats,
    }
    return json.dumps({**facts, "rows": rows}) if options.json else _text(facts, rows, columns)


def _text(facts: Mapping[str, Any], rows: Sequence[Row], columns: Mapping[str, tuple[str, float]]) -> str:
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
