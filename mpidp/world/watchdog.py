"""What all ranks do comes in, by messages; a report of who keeps the others waiting goes out, and the end of the job.

A thread of each rank tells two of them, the first and the last, what its rank does: seldom as long as all is well, once
a second while it waits. The first rank looks for waits that last too long; the last one takes its place when it hears
nothing of it. A rank that left while others wait for it is told so, and ends the job with its own exit code.
"""

import logging
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

from mpidp.world import stacks
from mpidp.world.collectives import reduced
from mpidp.world.communicators import is_survived
from mpidp.world.exit import AbortGuard, Departure
from mpidp.world.mailbox import Post
from mpidp.world.mpi import MPI
from mpidp.world.signals import Terminated
from mpidp.world.stacks import Address, Look, look_at, prepare
from mpidp.world.stall import ANSWER_S, ASK, LOOK, Beat, Inquiry, Seen, deserted, named, waits
from mpidp.world.status import START, Wait, status

log = logging.getLogger("mpidp.rank")

WARNING_S, ABORT_S = 60.0, 600.0
TICK_S = 1.0  # between two looks; shorter only where warnings are asked for sooner
RANKS_A_TICK = 256  # beyond so many ranks, looks become rarer, so that the watching rank has as little to read
QUIET_TICKS = 5  # between two letters of a rank that has nothing to tell
SILENT_TICKS = 3 * QUIET_TICKS
LEFT_S = 1.5  # that others wait after a rank was seen to leave
LEFT_END_S = 5.0  # for the rank that left to end the job with its own code
END_TIMEOUT_S = 5.0
ANNOUNCE_S, ANNOUNCE_POLL_S = 2.0, 0.002


@dataclass(frozen=True)
class Letter:
    """From rank to rank. Kinds: beat, watched, ask, look, answer, missed, end."""

    kind: str
    sender: int
    content: Any


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
        self._watched_at = float("-inf")
        self._beats = {rank: (Beat(rank, host), 0.0) for rank, (_, host, _) in enumerate(self._people)}
        self._left_at: dict[int, float] = {}
        self._told, self._told_at = Beat(self.rank, host), float("-inf")
        nodes = [number for number, _, _ in self._people]
        self._inquiry = Inquiry(nodes, self._send, self._say, self._end_job)
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

    def announce(self) -> None:
        """Waits until the others are told of this rank's phase: in what it does in it, it may not answer them."""
        phase, end = (status.phase, status.is_long), time.monotonic() + ANNOUNCE_S
        self.wake()
        while (self._told.phase, self._told.is_long) != phase and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(ANNOUNCE_POLL_S)

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
    def _silent_s(self) -> float:
        """Seconds after which one of whom nothing is heard is taken for one that does not answer."""
        return SILENT_TICKS * self.tick_s

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
        away_s, self._last_look = now - self._last_look, now
        self._clock += min(away_s, 3 * self.tick_s)
        if away_s > self._silent_s:
            self._inquiry.rest(self._clock)  # what this rank hears of waits now may be over by the next look

    def _take(self, letter: Letter) -> None:
        if letter.kind == "beat":
            beat: Beat = letter.content
            self._beats[beat.rank] = beat, self._clock
            if beat.has_left:
                self._left_at.setdefault(beat.rank, self._clock)
            if 0 < self.abort_s < beat.wait_s:
                self._send(beat.rank, "watched")
        elif letter.kind == "watched":
            self._watched_at = self._clock
        elif letter.kind == ASK:
            look = Look("its main thread:\n" + stacks.stack(stacks.main_thread()))
            self._send(letter.sender, "answer", (self.rank, look))
        elif letter.kind == LOOK:
            look = look_at(self._people[letter.content][2])
            self._send(letter.sender, "answer", (letter.content, look))
        elif letter.kind == "answer":
            self._inquiry.answered(*letter.content)
        elif letter.kind == "missed":
            self.missed = letter.content
        elif letter.kind == "end" and self._end is None:
            self._end = self._clock + LEFT_END_S, letter.content

    def _send(self, rank: int, kind: str, content: Any = None) -> None:
        letter = Letter(kind, self.rank, content)
        if rank == self.rank:
            self._take(letter)
        elif self.post is not None:
            self.post.send(rank, letter)

    def _tell(self) -> None:
        """Sends a beat where there is news, or nothing has been heard of this rank for a while."""
        beat, told = self._beat(), self._told
        is_news = beat.wait_s > self.tick_s or beat.has_left or bool(told.wait) != bool(beat.wait)
        is_news = is_news or beat.is_long != told.is_long
        is_news = is_news or (beat.is_long and beat.phase != told.phase)
        if is_news or self._clock - self._told_at > QUIET_TICKS * self.tick_s:
            for observer in {0, self.size - 1}:
                self._send(observer, "beat", beat)
            self._told, self._told_at = beat, self._clock  # now: `announce` waits for it

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
        silent_s = self._silent_s
        ages = {rank: self._clock - heard for rank, (_, heard) in self._beats.items()}
        return [Seen(beat, ages[rank], ages[rank] > silent_s) for rank, (beat, _) in sorted(self._beats.items())]

    def _watch(self) -> None:
        self._watch_alone()
        if self.post is None or self.rank not in (0, self.size - 1):
            return
        seen = self._seen()
        if self.rank != 0 and not seen[0].is_silent:
            self._inquiry.rest(self._clock)
            return
        self._watch_left(seen)
        if self._end is None:
            self._inquiry.look(seen, self._clock, self.warning_s, self.abort_s)

    def _watch_alone(self) -> None:
        """Reports this rank's own wait: at the limits if ranks cannot talk, else when nobody watches any more.

        Whoever watches may know that the wait is for a phase that takes long.
        """
        beat = self._told
        text = (
            f"{self.guard.tag} step {beat.step:,}, phase {beat.phase}: waits for other ranks since "
            f"{beat.wait_s:.0f} s, in {beat.wait}, at {beat.site}"
        )
        grace_s = 0.0 if self.post is None else self._silent_s + 2 * ANSWER_S
        is_watched = self.post is not None and self._clock - self._watched_at < max(self._silent_s, self.abort_s)
        if 0 < self.abort_s < beat.wait_s - grace_s and not is_watched:
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
        self._send(first, "missed", text)
        self._send(waiting[0].beat.rank, "end", f"mpidp: {named(left)} {text}")
        self._end = self._clock + 2 * LEFT_END_S, f"mpidp: {named(left)} {text}"

    def _say(self, text: str) -> None:
        log.info("%s", text)
        self.guard.tell(text)

    def _end_job(self, text: str) -> None:
        try:
            self._say(text)
        finally:
            self.guard.abort(1)


_departures: list[Departure] = []


def watch_rank(comm: MPI.Intracomm, host: str, node: int, guard: AbortGuard) -> Watchdog:
    """Starts the watchdog of this rank, and what ends the job at a signal. Collective.

    Args:
        comm: the ranks.
        host: this rank's node.
        node: number of this rank's node.
        guard: ends the job.
    """
    guard.where = _where
    may_talk = bool(reduced(comm, MPI.Query_thread() == MPI.THREAD_MULTIPLE, MPI.LAND))
    Terminated(guard)
    watchdog = Watchdog(comm, host, node, guard, may_talk)
    guard.before_abort, status.announce = watchdog.silence, watchdog.announce
    _departures.append(Departure(watchdog, guard))
    return watchdog


def watch_again(
    before: Watchdog | None, comm: MPI.Intracomm, host: str, node: int, guard: AbortGuard
) -> Watchdog | None:
    """A watchdog of those that are left, when ranks have died, in the place of the one before. Collective.

    Args:
        before: the watchdog of more ranks; None where there was none, and will be none.
        comm: the ranks, as in `watch_rank`.
        host: likewise.
        node: likewise.
        guard: likewise.
    """
    if before is None:
        return None
    before.abandon()
    watchdog = Watchdog(comm, host, node, guard, may_talk=before.post is not None)
    watchdog.configure(before.warning_s, before.abort_s)
    guard.before_abort, status.announce = watchdog.silence, watchdog.announce
    for departure in _departures:
        departure.watchdog = watchdog
    return watchdog


def _where() -> str:
    """Step and phase, once there has been one."""
    return "" if status.phase == START and status.step == 0 else f"{status.where()}: "
