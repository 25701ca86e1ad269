"""`mpidp data verify`: read everything in HDF5 files and report all that is wrong. Collective over the ranks.

Rank 0 reads the metadata and tells the others what there is; blocks of chunks are dealt out in turn. Alone, MPI is not
started.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from mpidp.hdf5.files.contents import too_large, virtual_gaps, walk
from mpidp.hdf5.files.file import Facts, inspect, open_file
from mpidp.hdf5.files.types import HDF5_ERRORS
from mpidp.printable import listed
from mpidp.tools.data.options import VerifyOptions
from mpidp.tools.data.scan import Bad, Finding, Scan, Work, describe_work
from mpidp.tools.table import Ticker, size_text
from mpidp.world.launch import launch_facts
from mpidp.world.world import World

_KIND_TEXT = {
    "non-finite": "values are not finite",
    "uint64": "values are larger than int64, torch's largest, can hold",
}


@dataclass(frozen=True)
class FileReport:
    """All that was found in a file; `findings` are those that are named, `num_findings` counts all.

    `unlooked` are datasets whose values were decoded only.
    """

    file: str
    num_datasets: int
    num_pieces: int
    read_bytes: int
    findings: tuple[Finding, ...]
    num_findings: int
    unlooked: tuple[str, ...] = ()


def merge(path: str, works: Sequence[Work], found: Sequence[Finding], scans: Sequence[Scan], limit: int) -> FileReport:
    """Put together what rank 0 found in the metadata and what all ranks found in the values.

    Of chunks that are missing, and of those that cannot be read, `limit` are named, and all are counted.
    """
    missing = [finding for work in works if not work.may_miss for finding in _missing(path, work)]
    unreadable = sorted((f for scan in scans for f in scan.findings), key=lambda f: (f.dataset, f.rows or (0, 0)))
    bad: dict[tuple[str, str, str], Bad] = {}
    for scan in scans:
        for key, mine in scan.bad.items():
            assert mine.first is not None
            bad.setdefault(key, Bad()).add(mine.count, mine.first, mine.example)
    values = [_value_finding(path, *key, total) for key, total in sorted(bad.items())]
    return FileReport(
        path,
        len(works),
        sum(work.num_pieces for work in works),
        sum(scan.read_bytes for scan in scans),
        (*found, *missing[:limit], *unreadable[:limit], *values),
        len(found) + len(missing) + sum(scan.unreadable for scan in scans) + len(values),
        tuple(f"{work.name} ({work.unlooked})" for work in works if work.unlooked),
    )


def to_text(report: FileReport) -> str:
    """Return a line for the file and one for each finding that is named."""
    what = f"{report.num_datasets} datasets, {report.num_pieces} chunks or ranges, {size_text(report.read_bytes)} read"
    if report.unlooked:
        what += f" (values decoded, but not looked at: {listed(report.unlooked)})"
    if not report.num_findings:
        return f"{report.file}: {what}: sound"
    lines = [f"{report.file}: {what}: {report.num_findings} {'finding' if report.num_findings == 1 else 'findings'}"]
    lines += [f"  {_line(finding)}" for finding in report.findings]
    more = report.num_findings - len(report.findings)
    return "\n".join([*lines, *([f"  and {more} more; --limit names more of them"] if more else [])])


def _line(finding: Finding) -> str:
    places = [f'dataset "{finding.dataset}"'] if finding.dataset else []
    if finding.rows is not None:
        places.append(f"rows {finding.rows[0]} to {finding.rows[1]}")
    if finding.chunk is not None:
        places.append(f"chunk {finding.chunk}")
    return f"{', '.join(places)}: {finding.text}" if places else finding.text


def _missing(path: str, work: Work) -> list[Finding]:
    """Return one finding for each run of missing chunks that follow each other."""
    findings: list[Finding] = []
    for run in np.split(work.missing, np.flatnonzero(np.diff(work.missing) != 1) + 1):
        if len(run):
            first, begin, end = int(run[0]), work.slices(int(run[0])), work.slices(int(run[-1]))
            rows = (begin[0].start, end[0].stop - 1) if begin else None
            what = f"{len(run)} chunks were" if work.is_chunked and len(run) > 1 else "was"
            chunk = work.place(first) if work.is_chunked else None
            text = f"{what} never written and would read as fill values"
            findings.append(Finding("missing", path, work.name, text, rows, chunk))
    return findings


def _value_finding(path: str, kind: str, name: str, member: str, bad: Bad) -> Finding:
    assert bad.first is not None
    where = f' of member "{member}"' if member else ""
    row = (bad.first[0], bad.first[0]) if bad.first else None
    text = f"{bad.count}{where} {_KIND_TEXT[kind]}; the first is {bad.example} at {list(bad.first)}"
    return Finding(kind, path, name, text, row)


def verify_by(options: VerifyOptions) -> tuple[str, bool]:
    """Verify files as asked; return the text, and whether nothing was found. Collective."""
    if (launch_facts(os.environ).size or 1) > 1:
        from mpidp.world.start import init

        world = init()
    else:
        world = World.alone()
    reports = [verify_file(path, options.limit, world, world.rank == 0) for path in options.files]
    if options.json:
        text = json.dumps({"files": [asdict(report) for report in reports]})
    else:
        text = "\n".join(to_text(report) for report in reports)
    return text, not any(report.num_findings for report in reports)


def verify_file(path: str, limit: int, world: World, speaks: bool = False) -> FileReport:
    """Read everything in a file; at most `limit` bad chunks are named by each rank. Collective over `world`.

    A file that cannot be opened is a report with one finding.
    """
    works, found = world.call_on_root(lambda: _overview(path))
    scan = Scan(limit)
    with world.raise_on_all_ranks(f"verifying {path}"):
        if works:
            with open_file(path, cache_bytes=0) as file:
                _scan(file, path, works, scan, world, speaks)
    return merge(path, works, found, world.comm.allgather(scan), limit)


def _scan(file: Any, path: str, works: Sequence[Work], scan: Scan, world: World, speaks: bool) -> None:
    total_bytes = sum(work.num_pieces * work.piece_bytes for work in works)
    what = "verifying" if world.size == 1 else f"verifying (rank 0 of {world.size})"
    ticker = Ticker(what, max(1, total_bytes // world.size), speaks)
    blocks = ((work, block) for work in works for block in work.blocks())
    for work, block in islice(blocks, world.rank, None, world.size):
        dataset = file[work.name]
        for number in block:
            if not work.is_missing(number):
                scan.read(path, dataset, work, number)
            ticker.add(work.piece_bytes)


def _overview(path: str) -> tuple[list[Work], list[Finding]]:
    """Return what to read of a file, and what is wrong already."""
    findings: list[Finding] = []
    works: list[Work] = []
    try:
        with open_file(path, cache_bytes=0) as file:
            tree = walk(file)
            findings += [Finding("dangling", path, name, text) for name, text in tree.dangling]
            findings += [Finding("unreadable", path, name, text) for name, text in tree.damaged]
            for name in ("", *tree.groups):
                findings += _attribute_findings(file[f"/{name}"], path, name)
            for name in tree.datasets:
                work, found = _look_at(file, path, name, name in tree.internal)
                findings += found
                works += [work] if work is not None else []
    except HDF5_ERRORS as error:
        return [], [*findings, Finding("unreadable", path, "", str(error).removeprefix(f"{path}: "))]
    return works, findings


def _attribute_findings(item: Any, path: str, name: str) -> list[Finding]:
    findings: list[Finding] = []
    try:
        for attribute in list(item.attrs):
            try:
                item.attrs[attribute]
            except TypeError:  # NumPy has no such type
                continue
            except HDF5_ERRORS as error:
                text = f'attribute "{attribute}" cannot be read: {error}'
                findings.append(Finding("unreadable", path, name, text))
    except HDF5_ERRORS as error:
        findings.append(Finding("unreadable", path, name, f"its attributes cannot be read: {error}"))
    return findings


def _unlooked(facts: Facts) -> str:
    """Return the type of a dataset whose values are no numbers or text to NumPy, "" for others."""
    if facts.left_out:
        return ", ".join(facts.left_out.values())
    return "" if facts.raw is not None or facts.type_name.startswith("string") else facts.type_name


def _look_at(file: Any, path: str, name: str, is_internal: bool) -> tuple[Work | None, list[Finding]]:
    """Return what to read of a dataset, None if it cannot or need not be read, and what is wrong with it."""
    try:
        facts = inspect(file, name)
        work, wrong = _described(file[name], name, facts)
        if work is not None:  # what a program keeps for itself it may leave unwritten
            work = replace(work, may_miss=is_internal, unlooked=_unlooked(facts))
        found = [Finding(kind, path, name, text) for kind, text in wrong.items()]
        return work, [*found, *_attribute_findings(file[name], path, name)]
    except HDF5_ERRORS as error:  # the tables of this dataset are damaged; others may be sound
        text = str(error).removeprefix(f'{path}: "{name}" ')
        return None, [Finding("unreadable", path, name, f"cannot be described: {text}")]


def _described(dataset: Any, name: str, facts: Facts) -> tuple[Work | None, dict[str, str]]:
    """Return what to read of a dataset, and what is wrong with it by kind of finding."""
    if facts.unknown_filters:
        text = f"filter {', '.join(facts.unknown_filters)} is not known here; pip install hdf5plugin"
        return None, {"unreadable": text}
    if dataset.shape is None:
        return None, {}
    if damage := too_large(dataset):
        return None, {"unreadable": f"is damaged, and was not read: {damage}"}
    if gaps := virtual_gaps(dataset):
        work = None if dataset.external else describe_work(dataset, name)
        return work, {"dangling": f"{gaps} is missing, and HDF5 would silently read fill values"}
    return describe_work(dataset, name), {}
