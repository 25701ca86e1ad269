"""The plan of a conversion: its tasks, and the datasets that it writes. Arithmetic only."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mpidp.errors import ConfigError, DataError
from mpidp.hdf5.plan import Bijection, IntArray
from mpidp.hdf5.write import MOST_CHUNK_BYTES, Filters, NewDataset
from mpidp.tools.data.source import Source, SourceField

DEFAULT_CHUNK_BYTES = 512 << 10
# Small files get smaller chunks, down to this: streams and ranks need some chunks to share.
SMALL_CHUNK_BYTES, ENOUGH_CHUNKS = 16 << 10, 64
# A task is long beside the time to start it, and short beside the memory of any machine.
TASK_BYTES = 4 << 20
# So many chunks of the source are in a task, of which the first and the last may belong to two tasks.
READ_STRETCHES = 4
# Rows as they came, rows shuffled, the part of the source being read, and results of this task and of one that waits.
COPIES = 5


@dataclass(frozen=True)
class Layout:
    """How the file is to be written; `chunk_rows` and `chunk_bytes` are 0 where the default is wanted."""

    filters: Filters
    chunk_rows: int = 0
    chunk_bytes: int = 0
    shuffle_seed: int | None = None


@dataclass(frozen=True)
class Group:
    """Fields with equal numbers of rows, by number. They have chunks of equal height and are made together."""

    fields: tuple[int, ...]
    row_bytes: int
    num_rows: int
    chunk_rows: int
    task_rows: int


@dataclass(frozen=True)
class Task:
    """Rows [start, stop) of the target, of all fields of a group; `start` begins a chunk."""

    number: int
    group: Group
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its rows before they are compressed."""
        return (self.stop - self.start) * self.group.row_bytes


@dataclass(frozen=True)
class Plan:
    """What is written where."""

    datasets: tuple[NewDataset, ...]
    groups: tuple[Group, ...]
    layout: Layout

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks, in the order of the target's rows."""
        return tuple(Task(number, *bounds) for number, bounds in enumerate(self._bounds()))

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows before they are compressed."""
        return sum(group.num_rows * group.row_bytes for group in self.groups)

    def rows(self, task: Task) -> IntArray:
        """Return the source's rows (int64) that become rows [start, stop) of the target."""
        places = np.arange(task.start, task.stop, dtype=np.int64)
        if self.layout.shuffle_seed is None:
            return places
        return Bijection(task.group.num_rows, self.layout.shuffle_seed, 0)(places)

    def _bounds(self) -> Iterator[tuple[Group, int, int]]:
        for group in self.groups:
            for start in range(0, group.num_rows, group.task_rows):
                yield group, start, min(start + group.task_rows, group.num_rows)


def make_plan(source: Source, layout: Layout, memory_bytes: int, workers: int) -> Plan:
    """Cut a conversion into tasks.

    Raises:
        ConfigError: rows of datasets of different length cannot be shuffled together.
        DataError: a field without values, names that exclude each other, or a row too large for a chunk.
    """
    fields = source.fields
    for field in fields:
        if field.row_bytes == 0:
            raise DataError(
                f'dataset "{field.name}" has rows of shape {field.shape}, which hold no values; leave it out'
            )
        clash = [other.name for other in fields if other.name.startswith(f"{field.name}/")]
        if clash:
            raise DataError(f'"{field.name}" and "{clash[0]}" cannot both be in an HDF5 file; choose by --fields')
    lengths = {field.name: field.num_rows for field in fields}
    if layout.shuffle_seed is not None and len(set(lengths.values())) > 1:
        found = ", ".join(f'"{name}" has {length}' for name, length in lengths.items())
        raise ConfigError(
            f"--shuffle-rows needs datasets of one length: {found}. Convert those that belong together by --fields."
        )
    most_bytes = memory_bytes // (COPIES * workers)
    groups: list[Group] = []
    for length in dict.fromkeys(lengths.values()):
        members = tuple(number for number, field in enumerate(fields) if field.num_rows == length)
        groups.append(_group(members, [fields[number] for number in members], layout, most_bytes))
    chunk_rows = {number: group.chunk_rows for group in groups for number in group.fields}
    datasets = tuple(
        NewDataset(
            field.name,
            (field.num_rows, *field.shape),
            field.dtype,
            chunk_rows[number],
            field.type_name or str(field.dtype),
            field.like,
            field.fill,
        )
        for number, field in enumerate(fields)
    )
    return Plan(datasets, tuple(groups), layout)


def default_chunk_rows(num_rows: int, row_bytes: int) -> int:
    """Return the chunk height that is used where the user names none."""
    usual = DEFAULT_CHUNK_BYTES // row_bytes
    small = max(num_rows // ENOUGH_CHUNKS, SMALL_CHUNK_BYTES // row_bytes)
    return max(1, min(usual, small, num_rows))


def _group(numbers: tuple[int, ...], fields: list[SourceField], layout: Layout, most_bytes: int) -> Group:
    num_rows = fields[0].num_rows
    largest = max(fields, key=lambda field: field.row_bytes)
    chunk_rows = _chunk_rows(largest, layout)
    row_bytes = sum(field.row_bytes for field in fields)
    if layout.shuffle_seed is None:
        # Chunks of the source are decoded whole: where those are large, so are tasks, or most would be done twice.
        read_bytes = READ_STRETCHES * max(field.read_rows for field in fields) * row_bytes
        task_bytes = min(max(TASK_BYTES, read_bytes), most_bytes)
    else:
        task_bytes = most_bytes
    return Group(numbers, row_bytes, num_rows, chunk_rows, max(1, task_bytes // (row_bytes * chunk_rows)) * chunk_rows)


def _chunk_rows(largest: SourceField, layout: Layout) -> int:
    """Return the height of the chunks of a group; the field with the largest rows decides."""
    if layout.chunk_rows:
        chunk_rows = layout.chunk_rows
    elif layout.chunk_bytes:
        chunk_rows = layout.chunk_bytes // largest.row_bytes
    else:
        chunk_rows = default_chunk_rows(largest.num_rows, largest.row_bytes)
    chunk_rows = max(1, min(chunk_rows, largest.num_rows))
    if chunk_rows * largest.row_bytes > MOST_CHUNK_BYTES:
        raise DataError(
            f'dataset "{largest.name}": chunks of {chunk_rows} rows of {largest.row_bytes} bytes are larger than the '
            f"{MOST_CHUNK_BYTES} bytes that HDF5 allows; ask for less by --chunk-rows, or split the samples"
        )
    return chunk_rows
