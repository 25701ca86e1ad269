"""What every rank found in a file enters; a report leaves, as text or JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from mpidp.printable import listed
from mpidp.tools.table import size_text
from mpidp.tools.verify.scan import Bad, Finding, Scan, Work

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


def merge(
    path: str,
    works: Sequence[Work],
    found: Sequence[Finding],
    scans: Sequence[Scan],
    limit: int,
    unlooked: tuple[str, ...] = (),
) -> FileReport:
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
        unlooked,
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


def to_json(reports: Sequence[FileReport]) -> str:
    """Return one line: a list of files with all that is known of each finding."""
    return json.dumps({"files": [asdict(report) for report in reports]})


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
    numbers = work.missing.tolist()
    start = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            findings.append(_missing_run(path, work, numbers[start], numbers[index - 1]))
            start = index
    return findings


def _missing_run(path: str, work: Work, first: int, last: int) -> Finding:
    begin, end = work.slices(first), work.slices(last)
    rows = (begin[0].start, end[0].stop - 1) if begin else None
    count = last - first + 1
    what = f"{count} chunks were" if work.is_chunked and count > 1 else "was"
    chunk = work.place(first) if work.is_chunked else None
    return Finding("missing", path, work.name, rows, chunk, f"{what} never written and would read as fill values")


def _value_finding(path: str, kind: str, name: str, member: str, bad: Bad) -> Finding:
    assert bad.first is not None
    where = f' of member "{member}"' if member else ""
    row = (bad.first[0], bad.first[0]) if bad.first else None
    text = f"{bad.count}{where} {_KIND_TEXT[kind]}; the first is {bad.example} at {list(bad.first)}"
    return Finding(kind, path, name, row, None, text)
