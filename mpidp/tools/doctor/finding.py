"""Findings of ranks enter, the findings of a job leave: equal ones once, with the ranks that have them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


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
    """A finding that is good news, or only news."""
    return Finding(Level.OK, code, text)


def warn(code: str, text: str, fix: str) -> Finding:
    """A finding that may cost time or trouble."""
    return Finding(Level.WARN, code, text, fix)


def fail(code: str, text: str, fix: str) -> Finding:
    """A finding that must be mended."""
    return Finding(Level.FAIL, code, text, fix)


def worst(findings: Sequence[Finding]) -> Level:
    """The worst level of all."""
    return max((finding.level for finding in findings), key=list(Level).index, default=Level.OK)


def merge(by_rank: Sequence[Sequence[Finding]], places: Sequence[str]) -> list[Finding]:
    """Put together what each rank found; the order is that of the first rank that has it.

    Findings of one level and code are one line: the numbers in their texts are those of the first rank.

    Args:
        by_rank: findings, indexed by rank.
        places: a name for each rank, such as "rank 3 on node7".
    """
    firsts: dict[tuple[Level, str, str], Finding] = {}
    ranks: dict[tuple[Level, str, str], list[int]] = {}
    for rank, findings in enumerate(by_rank):
        for finding in findings:
            # Good news of different ranks differ in numbers only. Bad news must not hide each other.
            key = (finding.level, finding.code, "" if finding.level is Level.OK else finding.fix)
            firsts.setdefault(key, finding)
            if rank not in ranks.setdefault(key, []):
                ranks[key].append(rank)
    return [replace(first, where=_where(first, ranks[key], places)) for key, first in firsts.items()]


def _where(finding: Finding, ranks: Sequence[int], places: Sequence[str]) -> str:
    if finding.level is Level.OK or len(ranks) == len(places):
        return ""
    return places[ranks[0]] + (f" and {len(ranks) - 1} more" if len(ranks) > 1 else "")
