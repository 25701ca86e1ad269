"""Rows of measured figures enter; one line of JSON or a table leaves, with the machine they were measured on."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from mpidp.tools.table import table
from mpidp.world.mpi import MPI
from mpidp.world.world import World

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
