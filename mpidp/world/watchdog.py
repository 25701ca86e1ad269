"""The watchdog: a thread of each rank that finds ranks which keep others waiting, reports them, and ends the job.

Each rank sends heartbeats to two ranks, the first and the last: rarely as long as it works, once a second while it
waits. The first rank looks for waits that last too long; the last one does when the first one is silent.
"""

import logging
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

from mpidp.world.exit import AbortGuard, ExitBarrier
from mpidp.world.mpi import MPI, is_survived, reduced
from mpidp.world.signals import EndAtSignal
from mpidp.world.stall import ANSWER_S, ASK, LOOK, Heartbeat, Seen, StallWatch, deserted, report_left
from mpidp.world.status import Address, Look, Wait, call_site, look_at, main_thread, prepare, stack, status

SHUT_TIMEOUT_S = 1.0
MOST_OPEN = 4  # messages to one rank that it has not received, as it does not while it is stopped


@dataclass(frozen=True)
class Message:
    """A message from rank to rank. Kinds: heartbeat, watched, ask, look, answer."""

    kind: str
    sender: int
    content: Any


class Mailbox:
    """Messages between ranks, sent and received without waiting. Construction is collective.

    Used by a thread while the main thread may be inside a call of MPI, so MPI must have been started with
    MPI_THREAD_MULTIPLE.

    Args:
        comm: the ranks; it is duplicated.
    """

    def __init__(self, comm: MPI.Intracomm):
        self.comm = MPI.Intracomm(comm.Dup())
        self._open: dict[int, list[MPI.Request]] = {}
        self._sent = [0] * comm.size
        self._received = 0
        self._use = threading.Lock()
        self._is_shut = False

    def send(self, rank: int, message: Message) -> bool:
        """Sends without waiting; False if too many messages to that rank have not been received yet."""
        with self._use:
            if self._is_shut:
                return False
            requests = [request for request in self._open.get(rank, []) if not request.Test()]
            self._open[rank] = requests
            if len(requests) >= MOST_OPEN:
                return False
            requests.append(self.comm.isend(message, dest=rank))
            self._sent[rank] += 1
            return True

    def received(self) -> list[Message]:
        """The messages that have arrived since the last call."""
        messages: list[Message] = []
        with self._use:
            while not self._is_shut and (message := self.comm.improbe()) is not None:
                messages.append(message.recv())
        self._received += len(messages)
        return messages

    def shut(self) -> None:
        """Ends sending and receiving for good, before MPI is aborted by another thread."""
        self._use.acquire(timeout=SHUT_TIMEOUT_S)  # never released: another thread may be blocked in there
        self._is_shut = True

    def close(self) -> None:
        """Receives what was sent and frees the communicator. Collective; no rank may send any more."""
        expected = sum(sent[self.comm.rank] for sent in self.comm.allgather(self._sent))
        while self._received < expected:
            self.received()
        for requests in self._open.values():
            MPI.Request.Waitall(requests)
        self.comm.Free()


log = logging.getLogger("mpidp.rank")

WARNING_S, ABORT_S = 60.0, 600.0
TICK_S = 1.0  # between two checks; shorter only where the limits are shorter
RANKS_A_TICK = 256  # with more ranks checks become rarer, so that the watching rank has no more to read
QUIET_TICKS = 5  # between two heartbeats of a rank that has no news
SILENT_TICKS = 3 * QUIET_TICKS
LEFT_S = 1.5  # how long others must have waited after a rank has left
END_TIMEOUT_S = 5.0
ANNOUNCE_S, ANNOUNCE_POLL_S = 2.0, 0.002


class Watchdog:
    """The watchdog thread of one rank. Construction is collective.

    Where MPI takes no calls from several threads, each rank can only report its own waits.

    Args:
        comm: the ranks.
        host: this rank's node.
        node: number of this rank's node.
        guard: ends the job.
    """

    def __init__(self, comm: MPI.Intracomm, host: str, node: int, guard: AbortGuard):
        self.rank, self.size, self.host, self.guard = comm.rank, comm.size, host, guard
        self.warning_s, self.abort_s = WARNING_S, ABORT_S
        may_talk = reduced(comm, MPI.Query_thread() == MPI.THREAD_MULTIPLE, MPI.LAND)
        self.mailbox = Mailbox(comm) if may_talk else None
        self._ranks: list[tuple[int, str, Address]] = comm.allgather((node, host, prepare()))
        self._clock, self._last_look = 0.0, time.monotonic()
        self._first_seen: tuple[Wait | None, float] = (None, 0.0)
        self._watched_at = float("-inf")
        self._beats = {rank: (Heartbeat(rank, host), 0.0) for rank, (_, host, _) in enumerate(self._ranks)}
        self._left_at: dict[int, float] = {}
        self._told, self._told_at = Heartbeat(self.rank, host), float("-inf")
        nodes = [number for number, _, _ in self._ranks]
        self._stalls = StallWatch(nodes, self._send, self._say, self._end_job)
        self._has_warned = False
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpidp-watchdog", daemon=True)
        self._thread.start()

    def configure(self, warning_s: float | None, abort_s: float | None) -> None:
        """Sets after how many seconds a wait is reported, and the job ended; 0 for never, None for no change.

        To be called with the same values on every rank.

        Raises:
            ValueError: a number that is negative, infinite or NaN.
        """
        for name, value in (("stall_warning_s", warning_s), ("stall_abort_s", abort_s)):
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name} is {value}; give a number of seconds, or 0 for never")
        self.warning_s = self.warning_s if warning_s is None else warning_s
        self.abort_s = self.abort_s if abort_s is None else abort_s
        self.wake()

    def silence(self) -> None:
        """Stops all calls of MPI by this thread, before the job is aborted."""
        if self.mailbox is not None:
            self.mailbox.shut()

    def wake(self) -> None:
        """Has the thread send a heartbeat now."""
        self._wake.set()

    def announce(self) -> None:
        """Waits until the heartbeat with this rank's phase is sent: during the phase it may not be able to answer."""
        phase, end = (status.phase, status.is_long), time.monotonic() + ANNOUNCE_S
        self.wake()
        while (self._told.phase, self._told.is_long) != phase and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(ANNOUNCE_POLL_S)

    def stop(self) -> None:
        """Ends the thread. The communicator stays, as it must where one of its ranks has died. Not collective."""
        self._stop.set()
        self._wake.set()
        self._thread.join(END_TIMEOUT_S)

    def close(self) -> None:
        """Ends the thread and frees the communicator. Collective; all ranks have left their main program."""
        self.stop()
        if self.mailbox is not None and not self._thread.is_alive():
            self.mailbox.close()

    @property
    def _silent_s(self) -> float:
        """Seconds without a heartbeat after which a rank counts as silent."""
        return SILENT_TICKS * self._tick_s

    @property
    def _tick_s(self) -> float:
        """Seconds between two checks."""
        soonest = min(limit or float("inf") for limit in (self.warning_s, self.abort_s))
        return min(TICK_S * max(1.0, self.size / RANKS_A_TICK), max(0.05, soonest / 8))

    def _run(self) -> None:
        try:
            self._look()
        except MPI.Exception as error:
            if not is_survived(error):
                raise
            log.info("the watchdog ends, as a rank has died; the ranks that are left start a new one")

    def _look(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(self._tick_s)
            self._wake.clear()
            self._advance()
            for message in self.mailbox.received() if self.mailbox else ():
                self._take(message)
            self._tell()
            self._watch()

    def _advance(self) -> None:
        """Advances the clock, which stops while this process does: a suspended job must not end when it is resumed."""
        now = time.monotonic()
        away_s, self._last_look = now - self._last_look, now
        self._clock += min(away_s, 3 * self._tick_s)
        if away_s > self._silent_s:
            self._stalls.rest(self._clock)  # waits in messages that arrived meanwhile may be over

    def _take(self, message: Message) -> None:
        if message.kind == "heartbeat":
            beat: Heartbeat = message.content
            self._beats[beat.rank] = beat, self._clock
            if beat.has_left:
                self._left_at.setdefault(beat.rank, self._clock)
            if 0 < self.abort_s < beat.wait_s:
                self._send(beat.rank, "watched")
        elif message.kind == "watched":
            self._watched_at = self._clock
        elif message.kind == ASK:
            look = Look("its main thread:\n" + stack(main_thread()))
            self._send(message.sender, "answer", (self.rank, look))
        elif message.kind == LOOK:
            look = look_at(self._ranks[message.content][2])
            self._send(message.sender, "answer", (message.content, look))
        elif message.kind == "answer":
            self._stalls.answered(*message.content)

    def _send(self, rank: int, kind: str, content: Any = None) -> None:
        message = Message(kind, self.rank, content)
        if rank == self.rank:
            self._take(message)
        elif self.mailbox is not None:
            self.mailbox.send(rank, message)

    def _tell(self) -> None:
        """Sends a heartbeat if there is news, or the last one was sent a while ago."""
        beat, told = self._beat(), self._told
        is_news = (
            *(beat.wait_s > self._tick_s, beat.has_left, bool(told.wait) != bool(beat.wait)),
            *(beat.is_long != told.is_long, beat.is_long and beat.phase != told.phase),
        )
        if any(is_news) or self._clock - self._told_at > QUIET_TICKS * self._tick_s:
            for observer in {0, self.size - 1}:
                self._send(observer, "heartbeat", beat)
            self._told, self._told_at = beat, self._clock  # now: `announce` waits for it

    def _beat(self) -> Heartbeat:
        wait = status.longest_wait()
        if wait is not self._first_seen[0]:
            self._first_seen = wait, self._clock
        phase_s = time.monotonic() - status.since
        beat = Heartbeat(self.rank, self.host, status.step, status.phase, phase_s, status.is_long, status.has_left)
        wait_s = self._clock - self._first_seen[1]
        if wait is None or wait_s < self._tick_s:
            return beat
        return replace(beat, wait=wait.name, wait_ranks=wait.ranks, wait_s=wait_s, site=call_site(wait.thread))

    def _seen(self) -> list[Seen]:
        ages = [(beat, self._clock - heard) for _, (beat, heard) in sorted(self._beats.items())]
        return [Seen(beat, age_s, age_s > self._silent_s) for beat, age_s in ages]

    def _watch(self) -> None:
        self._watch_alone()
        if self.mailbox is None or self.rank not in (0, self.size - 1):
            return
        seen = self._seen()
        if self.rank != 0 and not seen[0].is_silent:
            self._stalls.rest(self._clock)
            return
        left, waiting = deserted(seen, LEFT_S)
        # A heartbeat that was sent before the rank left proves nothing: the rank may just have made that call.
        left = [rank for rank in left if self._clock - self._left_at[rank.beat.rank] > LEFT_S + 2 * self._tick_s]
        if left:
            self._end_job(report_left(left, waiting))
        self._stalls.look(seen, self._clock, self.warning_s, self.abort_s)

    def _watch_alone(self) -> None:
        """Reports this rank's own wait: at the limits if ranks cannot talk, else when no rank watches any more.

        A watching rank knows whether the wait is for a phase that may take long.
        """
        beat = self._told
        text = (
            f"{self.guard.tag} step {beat.step:,}, phase {beat.phase}: waits for other ranks since "
            f"{beat.wait_s:.0f} s, in {beat.wait}, at {beat.site}"
        )
        grace_s = 0.0 if self.mailbox is None else self._silent_s + 2 * ANSWER_S
        is_watched = self.mailbox is not None and self._clock - self._watched_at < max(self._silent_s, self.abort_s)
        if 0 < self.abort_s < beat.wait_s - grace_s and not is_watched:
            self._end_job(f"{text}. The job ends (stall_abort_s = {self.abort_s:g}).")
        if self.mailbox is None and 0 < self.warning_s <= beat.wait_s:
            if not self._has_warned:
                self._say(text)
            self._has_warned = True
        else:
            self._has_warned = False

    def _say(self, text: str) -> None:
        log.info("%s", text)
        self.guard.tell(text)

    def _end_job(self, text: str) -> None:
        with self.guard.aborting(1):
            self._say(text)


_exit_barriers: list[ExitBarrier] = []


def watch_rank(
    comm: MPI.Intracomm, host: str, node: int, guard: AbortGuard, former: Watchdog | None = None
) -> Watchdog:
    """Starts this rank's watchdog, its exit barrier, and the handlers that end the job at a signal. Collective.

    Args:
        comm: the ranks.
        host: this rank's node.
        node: number of this rank's node.
        guard: ends the job.
        former: the watchdog of the ranks before some have died; it ends, and its barrier and handlers go on.
    """
    if former is not None:
        former.stop()
    watchdog = Watchdog(comm, host, node, guard)
    guard.before_abort, status.announce = watchdog.silence, watchdog.announce
    if former is None:
        EndAtSignal(guard)
        _exit_barriers.append(ExitBarrier(watchdog))
    else:
        watchdog.configure(former.warning_s, former.abort_s)
        for exit_barrier in _exit_barriers:
            exit_barrier.watchdog = watchdog
    return watchdog
