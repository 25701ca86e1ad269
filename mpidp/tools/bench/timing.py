"""Fair timing of competing pieces of work, each of which must show a right result first, and the report of it."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import torch

from mpidp.tools.table import table
from mpidp.world.mpi import MPI
from mpidp.world.world import World

# The first call of a kind allocates and connects, and a mistake in what it leaves behind shows only in the second.
CHECKED_CALLS = 2


def no_meter() -> float:
    """The meter of work that counts nothing."""
    return 0.0


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
    meter: Callable[[], float] = no_meter


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


Row = dict[str, str | int | float | None]


@dataclass(frozen=True)
class Report:
    """What a benchmark found.

    Attributes:
        kind: "allreduce" or "step".
        ranks, nodes: the size of the job.
        device: where rank 0 computes.
        mpi: first line of the MPI library's version text.
        torch: torch's version.
        threads: torch's CPU threads of a rank.
        repeats: timed repeats of each row.
        rows: "name", "bytes", "median_s", "min_s", "max_s" and the benchmark's own figures; None where a figure
            has no meaning.
    """

    kind: str
    ranks: int
    nodes: int
    device: str
    mpi: str
    torch: str
    threads: int
    repeats: int
    rows: Sequence[Row]

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    def to_text(self, columns: Mapping[str, tuple[str, float]]) -> str:
        """A heading and a table.

        Args:
            columns: header of a column -> the figure's key in a row, and what to multiply it with.
        """
        header = ["name", *columns]
        cells = [[_label(row), *(_cell(row[key], factor) for key, factor in columns.values())] for row in self.rows]
        return "\n".join([self._heading(), table(header, cells)])

    def _heading(self) -> str:
        ranks = f"{self.ranks} {'rank' if self.ranks == 1 else 'ranks'}"
        nodes = f"{self.nodes} {'node' if self.nodes == 1 else 'nodes'}"
        threads = f"{self.threads} {'thread' if self.threads == 1 else 'threads'} a rank"
        return (
            f"{self.kind}: {ranks} on {nodes}, {self.device}, {threads}, "
            f"{self.repeats} repeats\n{self.mpi}, torch {self.torch}"
        )


def make_report(kind: str, world: World, repeats: int, rows: Sequence[Row]) -> Report:
    """Adds the facts of this job to the rows."""
    return Report(
        kind=kind,
        ranks=world.size,
        nodes=world.num_nodes,
        device=_device_name(world.device),
        mpi=" ".join(MPI.Get_library_version().splitlines()[0].strip("\0").split()),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        repeats=repeats,
        rows=rows,
    )


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


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
