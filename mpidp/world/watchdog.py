"""What all ranks do comes in, by messages; a report of who keeps the others waiting goes out, and the end of the job.

A thread of each rank tells two of them, the first and the last, what its rank does: seldom as long as all is well, once
a second while it waits. The first rank looks for waits that last too long; the last one takes its place when it hears
nothing of it. A rank that left while others wait for it is told so, and ends the job with its own exit code.
"""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mpidp.world import stacks
from mpidp.world.abort import AbortGuard
from mpidp.world.mpi import MPI
from mpidp.world.post import Post
from mpidp.world.silent_stack import Address, look_at, prepare
from mpidp.world.stall import Beat, Seen, deserted, longest_wait_s, missing_ranks, named, report, to_describe, waits
from mpidp.world.status import Wait, status
from mpidp.world.tolerance import is_survived

log = logging.getLogger("mpidp")

WARNING_S, ABORT_S = 60.0, 600.0
TICK_S = 1.0  # between two looks; shorter only where warnings are asked for sooner
RANKS_A_TICK = 256  # beyond so many ranks, looks become rarer, so that the watching rank has as little to read
QUIET_TICKS = 5  # between two letters of a rank that has nothing to tell
SILENT_TICKS = 3 * QUIET_TICKS
ANSWER_S = 2.0  # for a rank to tell where it is
LEFT_S = 1.5  # that others wait after a rank was seen to leave
LEFT_END_S = 5.0  # for the rank that left to end the job with its own code
END_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Letter:
    """From rank to rank. Kinds: beat, ask, look, answer, missed, end."""

    kind: str
    sender: int
    content: Any = None


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


class Watchdog:
    """The thread of one rank. Construction is collective.

    Attributes:
        missed: why others wait for this rank, which has left; "" as long as they do not.

    Args:
        comm: the ranks.
        host: this rank's node.
        node: number of this rank's node.
        guard: ends the job.
        may_talk: whether MPI takes calls from several threads. If not, each rank can only report its own waits.
    """

    def __init__(self, comm: MPI.Intracomm, host: str, node: int, guard: AbortGuard, may_talk: bool):
        self.rank, self.size, self.host, self.guard = comm.rank, comm.size, host, guard
        self.missed = ""
        self.warning_s, self.abort_s = WARNING_S, ABORT_S
        self.post = Post(comm) if may_talk else None
        self._people: list[tuple[int, str, Address]] = comm.allgather((node, host, prepare()))
        self._clock, self._last_look = 0.0, time.monotonic()
        self._first_seen: tuple[Wait | None, float] = (None, 0.0)
        self._beats = {rank: (Beat(rank, host), 0.0) for rank, (_, host, _) in enumerate(self._people)}
        self._left_at: dict[int, float] = {}
        self._told, self._told_at = Beat(self.rank, host), float("-inf")
        self._incident: _Incident | None = None
        self._end: tuple[float, str] | None = None
        self._has_warned = False
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpidp-watchdog", daemon=True)
        self._thread.start()

    def configure(self, warning_s: float | None, abort_s: float | None) -> None:
        """When to report a wait, and when to end the job, in seconds; 0 for never, None to leave it as it is.

        To be called with the same on every rank.

        Raises:
            ValueError: a negative number, or none at all.
        """
        for name, value in (("stall_warning_s", warning_s), ("stall_abort_s", abort_s)):
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name} is {value}; give a number of seconds, or 0 for never")
        self.warning_s = self.warning_s if warning_s is None else warning_s
        self.abort_s = self.abort_s if abort_s is None else abort_s
        self.wake()

    def silence(self) -> None:
        """The job ends: the thread makes no more calls of MPI, but for those that end it."""
        if self.post is not None:
            self.post.shut()

    def wake(self) -> None:
        """There is something to tell now."""
        self._wake.set()

    def abandon(self) -> None:
        """Ends the thread. The communicator stays: one of its ranks has died. Not collective."""
        self._stop.set()
        self._wake.set()
        self._thread.join(END_TIMEOUT_S)

    def close(self) -> None:
        """Ends the thread and gives the communicator back. Collective; all ranks have left their main program."""
        self._stop.set()
        self._wake.set()
        self._thread.join(END_TIMEOUT_S)
        if self.post is not None and not self._thread.is_alive():
            self.post.close()

    @property
    def tick_s(self) -> float:
        """Seconds between two looks."""
        soonest = min(limit or float("inf") for limit in (self.warning_s, self.abort_s))
        return min(TICK_S * max(1.0, self.size / RANKS_A_TICK), max(0.05, soonest / 8))

    def _run(self) -> None:
        try:
            self._look()
        except MPI.Exception as error:
            if not is_survived(error):
                raise
            log.info("the watchdog has met the death of a rank; another one begins where the others go on")

    def _look(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(self.tick_s)
            self._wake.clear()
            self._advance()
            for letter in self.post.received() if self.post else ():
                self._take(letter)
            self._tell()
            self._watch()
            if self._end is not None and self._clock >= self._end[0]:
                self._end_job(self._end[1])

    def _advance(self) -> None:
        """The clock stands still while this process does: a job that was suspended must not end when it goes on."""
        now = time.monotonic()
        self._clock += min(now - self._last_look, 3 * self.tick_s)
        self._last_look = now

    def _take(self, letter: Letter) -> None:
        if letter.kind == "beat":
            beat: Beat = letter.content
            self._beats[beat.rank] = beat, self._clock
            if beat.has_left:
                self._left_at.setdefault(beat.rank, self._clock)
        elif letter.kind == "ask":
            text = "its main thread:\n" + stacks.stack(stacks.main_thread())
            self._send(letter.sender, Letter("answer", self.rank, (self.rank, text)))
        elif letter.kind == "look":
            text = look_at(self._people[letter.content][2])
            self._send(letter.sender, Letter("answer", self.rank, (letter.content, text)))
        elif letter.kind == "answer" and self._incident is not None:
            rank, text = letter.content
            self._incident.answers[rank] = text
        elif letter.kind == "missed":
            self.missed = letter.content
        elif letter.kind == "end" and self._end is None:
            self._end = self._clock + LEFT_END_S, letter.content

    def _send(self, rank: int, letter: Letter) -> None:
        if rank == self.rank:
            self._take(letter)
        elif self.post is not None:
            self.post.send(rank, letter)

    def _tell(self) -> None:
        """Sends a beat where there is news, or nothing has been heard of this rank for a while."""
        beat, told = self._beat(), self._told
        is_news = beat.wait_s > self.tick_s or beat.has_left or bool(told.wait) != bool(beat.wait)
        if is_news or self._clock - self._told_at > QUIET_TICKS * self.tick_s:
            self._told, self._told_at = beat, self._clock
            for observer in {0, self.size - 1}:
                self._send(observer, Letter("beat", self.rank, beat))

    def _beat(self) -> Beat:
        wait = status.longest_wait()
        if wait is not self._first_seen[0]:
            self._first_seen = wait, self._clock
        beat = Beat(
            self.rank,
            self.host,
            status.step,
            status.phase,
            time.monotonic() - status.since,
            status.is_long,
            status.has_left,
        )
        wait_s = self._clock - self._first_seen[1]
        if wait is None or wait_s < self.tick_s:
            return beat
        return replace(beat, wait=wait.name, wait_ranks=wait.ranks, wait_s=wait_s, site=stacks.call_site(wait.thread))

    def _seen(self) -> list[Seen]:
        silent_s = SILENT_TICKS * self.tick_s
        ages = {rank: self._clock - heard for rank, (_, heard) in self._beats.items()}
        return [Seen(beat, ages[rank], ages[rank] > silent_s) for rank, (beat, _) in sorted(self._beats.items())]

    def _watch(self) -> None:
        self._watch_alone()
        if self.post is None or self.rank not in (0, self.size - 1):
            return
        seen = self._seen()
        if self.rank != 0 and not seen[0].is_silent:
            return
        self._watch_left(seen)
        if self._end is None:
            self._watch_stall(seen)

    def _watch_alone(self) -> None:
        """Reports this rank's own wait: at the limits if ranks cannot talk, else if nobody ended the job in time."""
        beat = self._told
        if beat.has_left:
            return  # others may work alone for as long as they like
        text = (
            f"{self.guard.tag} step {beat.step:,}, phase {beat.phase}: waits for other ranks since "
            f"{beat.wait_s:.0f} s, in {beat.wait}, at {beat.site}"
        )
        grace_s = 0.0 if self.post is None else SILENT_TICKS * self.tick_s + 2 * ANSWER_S
        if 0 < self.abort_s < beat.wait_s - grace_s:
            self._end_job(f"{text}. The job ends (stall_abort_s = {self.abort_s:g}).")
        if self.post is None and 0 < self.warning_s <= beat.wait_s:
            if not self._has_warned:
                self._say(text)
            self._has_warned = True
        else:
            self._has_warned = False

    def _watch_left(self, seen: list[Seen]) -> None:
        """Ends the job when ranks wait for one that has left: by that rank, which has an exit code, or by another."""
        left, waiting = deserted(seen, LEFT_S)
        # A letter that was sent before the rank left says nothing: the rank may have come just then.
        left = [rank for rank in left if self._clock - self._left_at[rank.beat.rank] > LEFT_S + 2 * self.tick_s]
        if not left or self._end is not None:
            return
        text = f"left the job, its main program being over, while others wait for it: {'; '.join(waits(waiting))}"
        first = left[0].beat.rank
        self._send(first, Letter("missed", self.rank, text))
        self._send(waiting[0].beat.rank, Letter("end", self.rank, f"mpidp: {named(left)} {text}"))
        self._end = self._clock + 2 * LEFT_END_S, f"mpidp: {named(left)} {text}"

    def _watch_stall(self, seen: list[Seen]) -> None:
        wait_s, missing = longest_wait_s(seen), missing_ranks(seen)
        is_excused = any(rank.beat.is_long for rank in missing)
        ends_job = 0 < self.abort_s <= wait_s and not is_excused
        is_stalled = 0 < self.warning_s <= wait_s and not (is_excused and not any(rank.is_silent for rank in missing))
        incident = self._incident
        if not is_stalled and not ends_job:
            if incident is not None and incident.is_told:
                self._say("mpidp: the stall is over, all ranks go on.")
            self._incident = None
        elif incident is None or (ends_job and not incident.ends_job) or incident.is_outdated(seen):
            self._incident = _Incident(ends_job, self._clock, to_describe(seen))
            self._ask(seen)
        elif not incident.is_told:
            has_all = len(incident.answers) == len(incident.asked)
            if has_all or self._clock - incident.since > ANSWER_S:
                self._report(incident, seen, wait_s)

    def _ask(self, seen: list[Seen]) -> None:
        """Asks ranks where they are, and a neighbour on the node of those that do not answer."""
        assert self._incident is not None
        answering = [rank.beat.rank for rank in seen if not rank.is_silent]
        for rank in self._incident.asked:
            number = rank.beat.rank
            if not rank.is_silent:
                self._send(number, Letter("ask", self.rank))
                continue
            node = self._people[number][0]
            neighbour = next((other for other in answering if self._people[other][0] == node), None)
            if neighbour is None:
                self._incident.answers[number] = "and no rank of its node does"
            else:
                self._send(neighbour, Letter("look", self.rank, number))

    def _report(self, incident: _Incident, seen: list[Seen], wait_s: float) -> None:
        incident.is_told = True
        if incident.ends_job:
            then = f"The job ends (stall_abort_s = {self.abort_s:g})."
        elif self.abort_s:
            then = f"The job ends when this has lasted for {self.abort_s:g} s (stall_abort_s)."
        else:
            then = "The job goes on waiting (stall_abort_s = 0)."
        text = report(seen, incident.answers, wait_s, then)
        if incident.ends_job:
            self._end_job(text)
        else:
            self._say(text)

    def _say(self, text: str) -> None:
        log.info("%s", text)
        self.guard.tell(text)

    def _end_job(self, text: str) -> None:
        try:
            self._say(text)
        finally:
            self.guard.abort(1)
