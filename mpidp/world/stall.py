"""Stalls, waits that last too long: which ranks are missing, what is asked of them, and the report.

No MPI: the watching rank passes in the heartbeats that it has received; of some ranks there may be none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpidp.world.status import Look

ANSWER_S = 2.0  # for a rank to tell where it is
ASK, LOOK = "ask", "look"
MOST_NAMED = 8  # ranks that are described one by one; a thousand stacks would be too many to read


@dataclass(frozen=True)
class Heartbeat:
    """What a rank reports about itself.

    Attributes:
        rank, host: which rank, on which node.
        step, phase, phase_s: optimizer steps done, current phase, and how many seconds ago it began.
        is_long: whether this phase may keep the others waiting.
        has_left: whether its main program is over.
        wait: the call it waits in for other ranks; "" for none.
        wait_ranks: how many ranks that call has; 0 where not known.
        wait_s: how long it has waited.
        site: file, line and function of that call.
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
    """A rank as the watching one sees it: its last heartbeat, the age of that, and whether it is too old."""

    beat: Heartbeat
    age_s: float
    is_silent: bool

    @property
    def is_waiting(self) -> bool:
        """Whether its last heartbeat says that it waits and is recent: a silent rank may have gone on since."""
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
    """The ranks that left, and those that have waited for them for `least_s` or longer; two empty lists for none."""
    left = [rank for rank in seen if rank.beat.has_left]
    others = [rank for rank in seen if not rank.beat.has_left]
    waiting = [rank for rank in others if rank.is_waiting and rank.beat.wait_s >= least_s]
    for_all = [rank for rank in waiting if rank.beat.wait_ranks == len(seen)]
    # A call of some ranks only may not have those that left among them, unless no other rank could still come.
    if left and (for_all or (waiting and len(waiting) == len(others))):
        return left, for_all or waiting
    return [], []


def report_left(left: Sequence[Seen], waiting: Sequence[Seen]) -> str:
    """The message that the ranks `left` are gone, and where the others wait for them."""
    beat = left[0].beat
    verb = "its main program is" if len(left) == 1 else "their main programs are"
    return (
        f"mpidp: {named(left)} left the job at step {beat.step:,}, in phase {beat.phase}: {verb} over, while others "
        f"wait in a call that needs all: {'; '.join(waits(waiting))}. The job ends."
    )


def report(seen: Sequence[Seen], answers: Mapping[int, str], lasted_s: float, then: str) -> str:
    """The report of a stall: who is missing, in which call and where the others wait, and what each missing rank does.

    `answers` has, by rank, its stack, or why it does not answer; `then` is a sentence that says what will happen.
    """
    missing = missing_ranks(seen)
    step = max(rank.beat.step for rank in seen)
    head = "all ranks wait for each other, in calls that do not match"
    if missing:
        head = f"{named(missing)} {'does' if len(missing) == 1 else 'do'} not arrive"
    lines = [f"mpidp: stalled for {lasted_s:.0f} s after step {step:,}: {head}."]
    lines += [f"  {line}" for line in waits(seen)]
    for rank in to_describe(seen):
        lines += _describe(rank, answers.get(rank.beat.rank, ""))
    if len(missing) > MOST_NAMED:
        lines.append(f"  (and {len(missing) - MOST_NAMED} more)")
    return "\n".join([*lines, f"  {then}"])


def to_describe(seen: Sequence[Seen]) -> list[Seen]:
    """The ranks whose stacks the report shows: the missing ones, or one for each call where all wait."""
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
    return lines if more <= 0 else [*lines[:MOST_NAMED], f"(and {more} more)"]


def named(ranks: Sequence[Seen]) -> str:
    """Numbers of ranks, such as "ranks 0, 2-3"; a single one with its node."""
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


@dataclass
class _Stall:
    """A stall that is being investigated: the ranks asked, or their neighbours, when, and their answers so far."""

    ends_job: bool
    since: float
    asked: list[Seen]
    answers: dict[int, str] = field(default_factory=dict)
    is_told: bool = False

    def is_outdated(self, seen: Sequence[Seen]) -> bool:
        """Whether, before the report, a rank that was asked has become silent: then its neighbour must be asked."""
        unanswered = [rank for rank in self.asked if rank.beat.rank not in self.answers]
        return not self.is_told and any(seen[rank.beat.rank].is_silent and not rank.is_silent for rank in unanswered)


class StallWatch:
    """Investigates one stall at a time. Not collective.

    Args:
        nodes: the number of each rank's node.
        send: sends a message (rank, kind, content).
        say: prints a report.
        end_job: prints a report and ends the job.
    """

    def __init__(
        self,
        nodes: Sequence[int],
        send: Callable[[int, str, Any], None],
        say: Callable[[str], None],
        end_job: Callable[[str], None],
    ):
        self._nodes = nodes
        self._send, self._say, self._end_job = send, say, end_job
        self._stall: _Stall | None = None
        self._stopped: set[int] = set()
        self._excused_at = float("-inf")

    def answered(self, rank: int, look: Look) -> None:
        """Records an answer: where a rank is, told by itself or by a neighbour."""
        if look.is_stopped:
            self._stopped.add(rank)
        else:
            self._stopped.discard(rank)
        if self._stall is not None:
            self._stall.answers[rank] = look.text

    def rest(self, clock: float) -> None:
        """Starts counting waits from now: up to now another rank watched, or none."""
        self._stall, self._excused_at = None, clock
        self._stopped.clear()

    def look(self, seen: list[Seen], clock: float, warning_s: float, abort_s: float) -> None:
        """Checks for a stall and, if there is one, takes the next step: ask, report, or end the job.

        Args:
            seen: all ranks.
            clock: seconds; stands still while this process does.
            warning_s: seconds that ranks may wait before a report; 0 for no limit.
            abort_s: seconds before the job ends, likewise.
        """
        wait_s, missing = longest_wait_s(seen), missing_ranks(seen)
        self._stopped -= {rank.beat.rank for rank in seen if not rank.is_silent}
        is_excused = self._is_excused(missing)
        if is_excused:
            self._excused_at = clock
        counted_s = min(wait_s, clock - self._excused_at)
        is_doubtful = is_excused and any(rank.is_silent for rank in missing)
        least_s = warning_s or abort_s
        if 0 < least_s <= (wait_s if is_doubtful else counted_s):
            self._pursue(seen, clock, 0 < abort_s <= counted_s, warning_s, abort_s)
        elif not 0 < least_s <= wait_s:
            if self._stall is not None and self._stall.is_told and warning_s:
                self._say("mpidp: the stall is over, all ranks go on.")
            self._stall = None

    def _is_excused(self, missing: Sequence[Seen]) -> bool:
        """Whether a missing rank is in a phase that may take long, and its process is not stopped."""
        return any(rank.beat.is_long and rank.beat.rank not in self._stopped for rank in missing)

    def _pursue(self, seen: list[Seen], clock: float, ends_job: bool, warning_s: float, abort_s: float) -> None:
        """Asks the missing ranks, or reports their answers, or asks once more."""
        stall = self._stall
        if stall is None or ends_job != stall.ends_job or stall.is_outdated(seen):
            self._stall = _Stall(ends_job, clock, to_describe(seen))
            self._ask(self._stall, seen, abort_s)
        elif not stall.is_told:
            has_all = len(stall.answers) == len(stall.asked)
            if has_all or clock - stall.since > ANSWER_S:
                if self._stopped <= stall.answers.keys():
                    self._report(stall, seen, warning_s, abort_s)
                self._stopped &= stall.answers.keys()  # for the others nobody confirms it: checked again next time
        elif 0 < abort_s < clock - stall.since:
            self._stall = None  # a silent rank in a long phase is looked at again: it may have been stopped since

    def _ask(self, stall: _Stall, seen: list[Seen], abort_s: float) -> None:
        """Asks ranks where they are, and for those that do not answer a neighbour on their node."""
        answering = [rank.beat.rank for rank in seen if not rank.is_silent]
        for rank in stall.asked:
            number = rank.beat.rank
            if not rank.is_silent:
                self._send(number, ASK, None)
                continue
            neighbour = next((other for other in answering if self._nodes[other] == self._nodes[number]), None)
            if neighbour is not None:
                self._send(neighbour, LOOK, number)
            else:
                is_stopped = 0 < abort_s < rank.age_s  # no message from its whole node for so long
                self.answered(number, Look("and no rank of its node does", is_stopped))

    def _report(self, stall: _Stall, seen: list[Seen], warning_s: float, abort_s: float) -> None:
        stall.is_told = True
        outlook = _outlook(stall.ends_job, self._is_excused(missing_ranks(seen)), abort_s)
        text = report(seen, stall.answers, longest_wait_s(seen), outlook)
        if stall.ends_job:
            self._end_job(text)
        elif warning_s:
            self._say(text)


def _outlook(ends_job: bool, is_excused: bool, abort_s: float) -> str:
    """A sentence that says what will happen."""
    if ends_job:
        return f"The job ends (stall_abort_s = {abort_s:g})."
    if abort_s and is_excused:
        return "The job goes on waiting: this phase may take long."
    if abort_s:
        return f"The job ends when this has lasted for {abort_s:g} s (stall_abort_s)."
    return "The job goes on waiting (stall_abort_s = 0)."
