"""What ranks say of themselves comes in; of waits that last too long questions, a report and the end of the job go out.

On the rank that watches. Ranks that answer tell where they are; those that do not are looked at by a neighbour.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpidp.world.silent_stack import Look
from mpidp.world.stall import Seen, longest_wait_s, missing_ranks, report, to_describe

ANSWER_S = 2.0  # for a rank to tell where it is
ASK, LOOK = "ask", "look"


@dataclass
class _Incident:
    """A stall that is being looked into.

    Attributes:
        ends_job: whether the report is the last one.
        since: when ranks were asked, by the watchdog's clock.
        asked: the ranks that were asked, or whose node was.
        answers: what came.
        is_told: whether the report is out.
    """

    ends_job: bool
    since: float
    asked: list[Seen]
    answers: dict[int, str] = field(default_factory=dict)
    is_told: bool = False

    def is_outdated(self, seen: Sequence[Seen]) -> bool:
        """Whether a rank that was asked has turned out to be silent, before the report: its neighbour knows more."""
        unanswered = [rank for rank in self.asked if rank.beat.rank not in self.answers]
        return not self.is_told and any(seen[rank.beat.rank].is_silent and not rank.is_silent for rank in unanswered)


class Inquiry:
    """Looks into one stall after the other. Not collective.

    Args:
        nodes: the number of each rank's node.
        send: sends a rank a letter of a kind, with a content.
        say: tells people.
        end_job: tells people, and ends the job.
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
        self._incident: _Incident | None = None
        self._stopped: set[int] = set()
        self._excused_at = float("-inf")

    def answered(self, rank: int, look: Look) -> None:
        """Takes in where a rank is, as it or its neighbour tells."""
        if look.is_stopped:
            self._stopped.add(rank)
        else:
            self._stopped.discard(rank)
        if self._incident is not None:
            self._incident.answers[rank] = look.text

    def rest(self, clock: float) -> None:
        """Others watched up to now, or nobody: waits count from here on."""
        self._incident, self._excused_at = None, clock
        self._stopped.clear()

    def look(self, seen: list[Seen], clock: float, warning_s: float, abort_s: float) -> None:
        """Takes the next step, if there is a stall.

        Args:
            seen: all ranks.
            clock: seconds; stands still while this process does.
            warning_s: how long ranks may wait before that is reported; 0 for ever.
            abort_s: how long before the job ends, likewise.
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
            if self._incident is not None and self._incident.is_told and warning_s:
                self._say("mpidp: the stall is over, all ranks go on.")
            self._incident = None

    def _is_excused(self, missing: Sequence[Seen]) -> bool:
        """Phases that may take long may keep ranks from answering, too; but not if a process does nothing at all."""
        return any(rank.beat.is_long and rank.beat.rank not in self._stopped for rank in missing)

    def _pursue(self, seen: list[Seen], clock: float, ends_job: bool, warning_s: float, abort_s: float) -> None:
        """Asks, or reports what was answered, or asks once more."""
        incident = self._incident
        if incident is None or ends_job != incident.ends_job or incident.is_outdated(seen):
            self._incident = _Incident(ends_job, clock, to_describe(seen))
            self._ask(self._incident, seen, abort_s)
        elif not incident.is_told:
            has_all = len(incident.answers) == len(incident.asked)
            if has_all or clock - incident.since > ANSWER_S:
                if self._stopped <= incident.answers.keys():
                    self._report(incident, seen, warning_s, abort_s)
                self._stopped &= incident.answers.keys()  # of the others nobody confirms it: the next look decides
        elif 0 < abort_s < clock - incident.since:
            self._incident = None  # a silent rank in a long phase is looked at again: it may have been stopped since

    def _ask(self, incident: _Incident, seen: list[Seen], abort_s: float) -> None:
        """Asks ranks where they are, and a neighbour on the node of those that do not answer."""
        answering = [rank.beat.rank for rank in seen if not rank.is_silent]
        for rank in incident.asked:
            number = rank.beat.rank
            if not rank.is_silent:
                self._send(number, ASK, None)
                continue
            neighbour = next((other for other in answering if self._nodes[other] == self._nodes[number]), None)
            if neighbour is not None:
                self._send(neighbour, LOOK, number)
            else:
                is_stopped = 0 < abort_s < rank.age_s  # nothing of its whole node for so long
                self.answered(number, Look("and no rank of its node does", is_stopped))

    def _report(self, incident: _Incident, seen: list[Seen], warning_s: float, abort_s: float) -> None:
        incident.is_told = True
        outlook = _outlook(incident.ends_job, self._is_excused(missing_ranks(seen)), abort_s)
        text = report(seen, incident.answers, longest_wait_s(seen), outlook)
        if incident.ends_job:
            self._end_job(text)
        elif warning_s:
            self._say(text)


def _outlook(ends_job: bool, is_excused: bool, abort_s: float) -> str:
    """What will happen, in words."""
    if ends_job:
        return f"The job ends (stall_abort_s = {abort_s:g})."
    if abort_s and is_excused:
        return "The job goes on waiting: this phase may take long."
    if abort_s:
        return f"The job ends when this has lasted for {abort_s:g} s (stall_abort_s)."
    return "The job goes on waiting (stall_abort_s = 0)."
