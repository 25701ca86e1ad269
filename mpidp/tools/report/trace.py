"""A run's `trace.json` (Chrome's trace events) enters, the mean time of each phase per step and rank leaves."""

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The phase that lasts until the slowest rank is there: its length says nothing of the rank that it is of.
_TOGETHER = "reduce"


@dataclass(frozen=True)
class RankTime:
    """Where the time of one rank went, in the traced steps.

    Attributes:
        rank: its number.
        steps: how many were traced.
        phases_s: seconds of each phase, of all steps; what is done between steps is left out.
        waiting_s: seconds in which its training thread waited for other ranks, of all steps.
        own_s: seconds in phases, without reducing and waiting, of all steps: what the rank takes by itself.
    """

    rank: int
    steps: int
    phases_s: dict[str, float]
    waiting_s: float
    own_s: float


@dataclass(frozen=True)
class Trace:
    """What a trace says, or why it cannot be used.

    Attributes:
        ranks: by number; empty if it cannot be used.
        fault: why not, or "".
    """

    ranks: tuple[RankTime, ...]
    fault: str = ""

    @property
    def slowest(self) -> RankTime:
        """The rank that takes longest a step by itself."""
        return max(self.ranks, key=lambda rank: rank.own_s / rank.steps)


def read_trace(path: Path) -> Trace | None:
    """The trace of a run; None if there is no such file. A trace that cannot be used says why."""
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return Trace((), f"it cannot be read ({error})")
    events = content.get("traceEvents") if isinstance(content, dict) else None
    of_ranks: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events if isinstance(events, list) else []:
        if _is_span(event):
            of_ranks[event["pid"]].append(event)
    ranks = tuple(_rank_time(rank, spans) for rank, spans in sorted(of_ranks.items()))
    return Trace(ranks) if ranks else Trace((), "it holds no phases of any rank")


def _is_span(event: Any) -> bool:
    return (
        isinstance(event, dict)
        and event.get("ph") == "X"
        and event.get("cat") in ("step", "phase", "wait")
        and all(isinstance(event.get(key), int | float) for key in ("ts", "dur"))
        and isinstance(event.get("pid"), int)
    )


def _rank_time(rank: int, events: list[dict[str, Any]]) -> RankTime:
    steps = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event["cat"] == "step")
    training = {event.get("tid") for event in events if event["cat"] == "phase"}  # helper threads wait beside it
    spans = [event for event in events if event["cat"] != "step" and event.get("tid") in training]
    if steps:
        spans = [span for span in spans if _is_within(span, steps)]
    phases_us: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        if span["cat"] == "phase":
            phases_us[str(span.get("name", "?"))] += span["dur"]
    waits = [span for span in spans if span["cat"] == "wait"]
    together = waits + [span for span in spans if span["cat"] == "phase" and span.get("name") == _TOGETHER]
    return RankTime(
        rank=rank,
        steps=len(steps) or _num_steps(spans),
        phases_s={name: value / 1e6 for name, value in phases_us.items()},
        waiting_s=_covered_us(waits) / 1e6,
        own_s=(_covered_us(spans) - _covered_us(together)) / 1e6,
    )


def _is_within(span: dict[str, Any], steps: list[tuple[float, float]]) -> bool:
    """Whether the middle of a span lies in a step, and not in what is done between steps, such as an evaluation."""
    middle = span["ts"] + span["dur"] / 2
    number = bisect_right(steps, middle, key=lambda step: step[0])
    return number > 0 and middle <= steps[number - 1][1]


def _num_steps(spans: list[dict[str, Any]]) -> int:
    """Of a trace that names no steps: how many optimizer phases it has, of which a step has one."""
    counts = Counter(span.get("name") for span in spans if span["cat"] == "phase")
    return counts["optimizer"] or min(counts.values(), default=1)


def _covered_us(spans: Iterable[dict[str, Any]]) -> float:
    """Length of the time that at least one of the spans covers: waits lie within phases, and phases may overlap."""
    covered = 0.0
    reached = float("-inf")
    for start, end in sorted((span["ts"], span["ts"] + span["dur"]) for span in spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
