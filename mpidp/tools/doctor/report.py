"""Findings and facts enter; text for a terminal, Markdown for an issue report, or JSON leaves. Pure."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mpidp.tools.doctor.facts import RankFacts
from mpidp.tools.doctor.finding import Finding, Level, worst

FORMAT = 1


@dataclass(frozen=True)
class Report:
    """What doctor has to say.

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
