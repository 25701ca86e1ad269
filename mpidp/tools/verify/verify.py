"""Paths of HDF5 files enter; a report of all that is wrong leaves, on every rank. Behind `mpidp data verify`.

Rank 0 reads the metadata and tells the others what there is; blocks of chunks are dealt out in turn. Alone, nothing of
MPI is started. Collective where there are several ranks.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from mpidp.errors import DataError
from mpidp.hdf5.files.dangling import virtual_gaps, walk
from mpidp.hdf5.files.file import inspect, open_file
from mpidp.tools.data_options import VerifyOptions
from mpidp.tools.ticker import Ticker
from mpidp.tools.verify.report import FileReport, merge, to_json, to_text
from mpidp.tools.verify.scan import Finding, Scan, Work, describe_work
from mpidp.world.launch import launch_facts

if TYPE_CHECKING:
    from mpidp.world.world import World

T = TypeVar("T")

_HDF5_ERRORS = (DataError, OSError, RuntimeError, KeyError)


@dataclass(frozen=True)
class Overview:
    """What rank 0 learnt of a file: what to read, and what is wrong already."""

    works: tuple[Work, ...]
    findings: tuple[Finding, ...]


def verify_by(options: VerifyOptions) -> tuple[str, bool]:
    """Verify files as asked; return the text, and whether nothing was found. Collective."""
    world = _world()
    speaks = world is None or world.rank == 0
    reports = [verify_file(path, options.limit, world, speaks) for path in options.files]
    text = to_json(reports) if options.json else "\n".join(to_text(report) for report in reports)
    return text, not any(report.num_findings for report in reports)


def verify_file(path: str, limit: int, world: "World | None" = None, speaks: bool = False) -> FileReport:
    """Read everything in a file; at most `limit` bad chunks are named by each rank. Collective over `world`.

    A file that cannot be opened is a report with one finding.
    """
    overview = _at_root(world, lambda: _overview(path))
    rank, size = (0, 1) if world is None else (world.rank, world.size)
    scan = Scan(limit)
    with nullcontext() if world is None else world.together(f"verifying {path}"):
        if overview.works:
            with open_file(path, cache_bytes=0) as file:
                _scan(file, path, overview, scan, (rank, size), speaks)
    scans = [scan] if world is None else world.comm.allgather(scan)
    return merge(path, overview.works, overview.findings, scans, limit)


def _scan(file: Any, path: str, overview: Overview, scan: Scan, share: tuple[int, int], speaks: bool) -> None:
    """Read this rank's share of the blocks."""
    rank, size = share
    total_bytes = sum(work.num_pieces * work.piece_bytes for work in overview.works)
    what = "verifying" if size == 1 else f"verifying (rank 0 of {size})"
    with Ticker(what, max(1, total_bytes // size), speaks) as ticker:
        for index, (work, block) in enumerate(_blocks(overview.works)):
            if index % size != rank:
                continue
            dataset = file[work.name]
            for number in block:
                if not work.is_missing(number):
                    scan.read(path, dataset, work, number)
                ticker.add(work.piece_bytes)


def _blocks(works: tuple[Work, ...]) -> Iterator[tuple[Work, range]]:
    for work in works:
        for block in work.blocks():
            yield work, block


def _overview(path: str) -> Overview:
    findings: list[Finding] = []
    works: list[Work] = []
    try:
        with open_file(path, cache_bytes=0) as file:
            tree = walk(file)
            findings += [Finding("dangling", path, name, None, None, text) for name, text in tree.dangling]
            findings += [Finding("unreadable", path, name, None, None, text) for name, text in tree.damaged]
            for name in sorted(tree.datasets):
                work, found = _look_at(file, path, name)
                findings += found
                works += [work] if work is not None else []
    except _HDF5_ERRORS as error:
        findings.append(Finding("unreadable", path, "", None, None, str(error).removeprefix(f"{path}: ")))
        return Overview((), tuple(findings))
    return Overview(tuple(works), tuple(findings))


def _look_at(file: Any, path: str, name: str) -> tuple[Work | None, list[Finding]]:
    """Return what to read of a dataset, None if it cannot or need not be read, and what is wrong with it."""
    try:
        return _described(file, path, name)
    except _HDF5_ERRORS as error:  # the tables of this dataset are damaged; others may be sound
        return None, [Finding("unreadable", path, name, None, None, f"cannot be described: {error}")]


def _described(file: Any, path: str, name: str) -> tuple[Work | None, list[Finding]]:
    dataset = file[name]
    facts = inspect(file, name)
    if facts.unknown_filters:
        text = f"filter {', '.join(facts.unknown_filters)} is not known here; pip install 'mpidp[compression]'"
        return None, [Finding("unreadable", path, name, None, None, text)]
    if dataset.shape is None:
        return None, []
    gaps = virtual_gaps(dataset)
    if gaps:
        text = f"{gaps} is missing, and HDF5 would read fill values without a word"
        work = None if dataset.external else describe_work(dataset, name)
        return work, [Finding("dangling", path, name, None, None, text)]
    return describe_work(dataset, name), []


def _at_root(world: "World | None", function: Callable[[], T]) -> T:
    return function() if world is None else world.from_root(function)


def _world() -> "World | None":
    if (launch_facts(os.environ).size or 1) == 1:
        return None
    from mpidp.world.start import init

    return init()
