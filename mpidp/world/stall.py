"""What every rank last said of itself comes in; who keeps the others waiting goes out, and a report for people.

Plain arithmetic and text: whoever watches may be any rank, and may have heard nothing of some.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MOST_NAMED = 8  # ranks that are described one by one; a thousand stacks help nobody


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself.

    Attributes:
        rank, host: who.
        step, phase, phase_s: optimizer steps done, what it does and since how many seconds.
        is_long: whether this phase may keep the others waiting.
        has_left: whether its main program is over.
        wait: the call it waits in for other ranks; "" for none.
        wait_ranks: how many ranks that call has; 0 where not known.
        wait_s: how long it has waited.
        site: where the call is made.
    """

    rank: int
    host: str
    step: int = 0
    phase: str = "start"
    phase_s: float = 0.0
    is_long: bool = False
    has_left: bool = False
    wait: str = ""
    wait_ranks: int = 0
    wait_s: float = 0.0
    site: str = ""


@dataclass(frozen=True)
class Seen:
    """A rank as the watching one sees it: its last beat, so many seconds old, and whether that is too old."""

    beat: Beat
    age_s: float
    is_silent: bool

    @property
    def is_waiting(self) -> bool:
        """Whether it said that it waits and may still be believed: a silent rank that waited may have gone on."""
        return bool(self.beat.wait) and not self.is_silent


def longest_wait_s(seen: Sequence[Seen]) -> float:
    """How long some rank has waited; 0 when none does.

    Ranks that have left wait for one that still works alone as long as it takes, but not for one that is silent.
    """
    missing = missing_ranks(seen)
    silence_s = max((rank.age_s for rank in missing), default=0.0) if all(rank.is_silent for rank in missing) else 0.0
    waiting = [rank.beat for rank in seen if rank.is_waiting]
    return max((min(beat.wait_s, silence_s) if beat.has_left else beat.wait_s for beat in waiting), default=0.0)


def missing_ranks(seen: Sequence[Seen]) -> list[Seen]:
    """The ranks that others may wait for: those that do not wait themselves."""
    return [rank for rank in seen if not rank.is_waiting]


def deserted(seen: Sequence[Seen], least_s: float) -> tuple[list[Seen], list[Seen]]:
    """The ranks that left and those that wait for them in vain, since `least_s` or longer; two empty lists for none."""
    left = [rank for rank in seen if rank.beat.has_left]
    others = [rank for rank in seen if not rank.beat.has_left]
    waiting = [rank for rank in others if rank.is_waiting and rank.beat.wait_s >= least_s]
    for_all = [rank for rank in waiting if rank.beat.wait_ranks == len(seen)]
    # A call of some ranks only may not have those that left among them, unless nobody else could still come.
    if left and (for_all or (waiting and len(waiting) == len(others))):
        return left, for_all or waiting
    return [], []


def report(seen: Sequence[Seen], answers: Mapping[int, str], lasted_s: float, then: str) -> str:
    """The whole story: who is missing, what the others wait in and where, and what each missing rank does.

    Args:
        seen: all ranks.
        answers: by rank, its stack, or why it does not answer.
        lasted_s: how long the longest wait has lasted.
        then: what will happen.
    """
    missing = missing_ranks(seen)
    step = max(rank.beat.step for rank in seen)
    if missing:
        verb = "does" if len(missing) == 1 else "do"
        head = f"{named(missing)} {verb} not arrive"
    else:
        head = "all ranks wait for each other, in calls that do not belong together"
    lines = [f"mpidp: stalled for {lasted_s:.0f} s after step {step:,}: {head}."]
    lines += [f"  {line}" for line in waits(seen)]
    for rank in to_describe(seen):
        lines += _describe(rank, answers.get(rank.beat.rank, ""))
    if len(missing) > MOST_NAMED:
        lines.append(f"  (and {len(missing) - MOST_NAMED} ranks more)")
    return "\n".join([*lines, f"  {then}"])


def to_describe(seen: Sequence[Seen]) -> list[Seen]:
    """The ranks whose stacks are worth seeing: the missing ones, or one for each call where all wait."""
    missing = missing_ranks(seen)
    one_each = {(rank.beat.wait, rank.beat.site): rank for rank in reversed(seen)}
    return (missing or sorted(one_each.values(), key=lambda rank: rank.beat.rank))[:MOST_NAMED]


def waits(seen: Sequence[Seen]) -> list[str]:
    """A line for each call that ranks wait in: "ranks 0, 2-3 wait in allreduce, at ..."."""
    groups: dict[tuple[str, str], list[Seen]] = {}
    for rank in seen:
        if rank.is_waiting:
            groups.setdefault((rank.beat.wait, rank.beat.site), []).append(rank)
    lines = [
        f"{named(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {wait}, at {site}"
        for (wait, site), ranks in groups.items()
    ]
    more = len(lines) - MOST_NAMED
    return lines if more <= 0 else [*lines[:MOST_NAMED], f"(and {more} places more)"]


def named(ranks: Sequence[Seen]) -> str:
    """Numbers of ranks, runs of them in short, with their node where it is one."""
    numbers = sorted(rank.beat.rank for rank in ranks)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {text} ({ranks[0].beat.host})" if len(numbers) == 1 else f"ranks {text}"


def _describe(rank: Seen, answer: str) -> list[str]:
    beat = rank.beat
    place = f"step {beat.step:,}, phase {beat.phase}"
    if not rank.is_silent:
        first = f"  rank {beat.rank} on {beat.host}: {place} for {beat.phase_s + rank.age_s:.0f} s"
    else:
        first = f"  rank {beat.rank} on {beat.host} does not answer: heard of {rank.age_s:.0f} s ago, at {place}"
    what, _, more = answer.partition("\n")
    indented = [f"    {line}" for line in more.rstrip().split("\n") if line]
    return [f"{first}; {what}" if what else first, *indented]
