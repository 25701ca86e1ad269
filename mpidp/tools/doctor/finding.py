"""Findings: their levels, the merging of those of many ranks into one list, and its printing. Pure."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from mpidp.tools.doctor.facts import RankFacts


class Level(StrEnum):
    """How bad a finding is."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: FAIL stops a job or makes it wrong, WARN makes it slow or may stop it.
        code: what was looked at, such as "cores.threads": the same in every version.
        text: what was found.
        fix: what to do, in one line; "" where there is nothing to do.
        where: which ranks have a fault; "" for all, or for the one there is.
    """

    level: Level
    code: str
    text: str
    fix: str = ""
    where: str = ""


def ok(code: str, text: str) -> Finding:
    """A finding that needs no action."""
    return Finding(Level.OK, code, text)


def warn(code: str, text: str, fix: str) -> Finding:
    """A finding that may cost time or cause trouble."""
    return Finding(Level.WARN, code, text, fix)


def fail(code: str, text: str, fix: str) -> Finding:
    """A finding that must be fixed: it stops a job or makes it wrong."""
    return Finding(Level.FAIL, code, text, fix)


def worst(findings: Sequence[Finding]) -> Level:
    """The worst level of all."""
    return max((finding.level for finding in findings), key=list(Level).index, default=Level.OK)


def merge(by_rank: Sequence[Sequence[Finding]], places: Sequence[str]) -> list[Finding]:
    """Merge the findings of all ranks; the order is that of the first rank that has it.

    Findings of one level and code are one line: the numbers in their texts are those of the first rank.

    Args:
        by_rank: findings, indexed by rank.
        places: a name for each rank, such as "rank 3 on node7".
    """
    firsts: dict[tuple[Level, str, str], Finding] = {}
    ranks: dict[tuple[Level, str, str], list[int]] = {}
    for rank, findings in enumerate(by_rank):
        for finding in findings:
            # OK findings of different ranks differ in numbers only; others must not hide each other.
            key = (finding.level, finding.code, "" if finding.level is Level.OK else finding.fix)
            firsts.setdefault(key, finding)
            if rank not in ranks.setdefault(key, []):
                ranks[key].append(rank)
    return [replace(first, where=_where(first, ranks[key], places)) for key, first in firsts.items()]


def _where(finding: Finding, ranks: Sequence[int], places: Sequence[str]) -> str:
    if finding.level is Level.OK or len(ranks) == len(places):
        return ""
    return places[ranks[0]] + (f" and {len(ranks) - 1} more" if len(ranks) > 1 else "")


FORMAT = 1


@dataclass(frozen=True)
class Report:
    """The report of doctor.

    Attributes:
        findings: for the whole job.
        job: facts of each rank, by rank; empty where only a log was read.
        measured: what --probe measured; empty without it.
    """

    findings: Sequence[Finding]
    job: Sequence[RankFacts] = ()
    measured: dict[str, Any] | None = None

    @property
    def level(self) -> Level:
        """The worst of all findings."""
        return worst(self.findings)

    def counts(self) -> str:
        """How many of each level."""
        numbers = {level: sum(finding.level is level for finding in self.findings) for level in reversed(Level)}
        return ", ".join(f"{number} {level}" for level, number in numbers.items())


def to_text(report: Report) -> str:
    """Lines for a terminal; the fix of a finding is below it."""
    lines: list[str] = []
    for finding in report.findings:
        where = f" [{finding.where}]" if finding.where else ""
        lines.append(f"{finding.level:<4}  {finding.code:<20} {finding.text}{where}")
        if finding.fix:
            lines.append(f"      {'':<20} fix: {finding.fix}")
    return "\n".join([*lines, report.counts()])


def to_markdown(report: Report) -> str:
    """A table, and the facts folded away below it."""
    rows = ["| | what | found | fix |", "|---|---|---|---|"]
    for finding in report.findings:
        where = f" ({finding.where})" if finding.where else ""
        cells = (str(finding.level), f"`{finding.code}`", finding.text + where, finding.fix)
        rows.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    facts = json.dumps(_facts(report), indent=1)
    folded = ["<details><summary>facts</summary>", "", "```json", facts, "```", "", "</details>"]
    return "\n".join(["### mpidp doctor", "", *rows, "", f"**{report.counts()}**", "", *folded])


def to_json(report: Report) -> str:
    """One line: `format`, `level`, `findings`, and the facts."""
    findings = [asdict(finding) for finding in report.findings]
    return json.dumps({"format": FORMAT, "level": str(report.level), "findings": findings, **_facts(report)})


def _facts(report: Report) -> dict[str, Any]:
    return {"ranks": [asdict(facts) for facts in report.job], "measured": report.measured}


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
