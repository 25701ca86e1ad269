"""Who keeps whom waiting, the words for it, and what the rank that watches asks, reports and does (behaviour 32)."""

import threading
import time
from typing import Any

import pytest

from mpidp.world.stall import (
    ANSWER_S,
    ASK,
    LOOK,
    Heartbeat,
    Seen,
    StallWatch,
    deserted,
    longest_wait_s,
    missing_ranks,
    named,
    report,
    report_left,
)
from mpidp.world.status import Look, Status

WARNING_S, ABORT_S = 60.0, 600.0


def seen(
    rank: int, wait_s: float = 0.0, *, age_s: float = 1.0, silent: bool = False, left: bool = False, ranks: int = 4
) -> Seen:
    wait = "allreduce" if wait_s else ""
    beat = Heartbeat(
        rank, f"node{rank // 2}", 7, "reduce" if wait else "data", 2.0, False, left, wait, ranks, wait_s, "a.py:3"
    )
    return Seen(beat, age_s, silent)


def numbers(ranks: list[Seen]) -> list[int]:
    return [rank.beat.rank for rank in ranks]


def test_missing_is_who_does_not_wait() -> None:
    """Behaviour 32: a silent rank is missing, even if it waited when it was last heard of."""
    ranks = [seen(0, 70.0), seen(1), seen(2, 65.0, silent=True), seen(3, 60.0)]
    assert numbers(missing_ranks(ranks)) == [1, 2]
    assert longest_wait_s(ranks) == 70.0
    assert longest_wait_s([seen(0), seen(1)]) == 0.0


@pytest.mark.parametrize(
    ("missing", "wait_s"),
    [
        ([], 0.0),  # all leave: nobody is waited for
        ([seen(2), seen(3)], 0.0),  # they work alone
        ([seen(2, silent=True, age_s=20.0), seen(3)], 0.0),  # one of them does
        ([seen(2, silent=True, age_s=20.0)], 20.0),  # silent after long work
        ([seen(2, silent=True, age_s=90.0), seen(3, silent=True, age_s=80.0, left=True)], 70.0),
    ],
)
def test_ranks_that_have_left_wait_for_silent_ones_only(missing: list[Seen], wait_s: float) -> None:
    """Behaviour 32."""
    assert longest_wait_s([seen(0, 70.0, left=True), seen(1, 60.0, left=True), *missing]) == wait_s
    if missing and not missing[0].is_silent:
        assert longest_wait_s([seen(0, 70.0, left=True), seen(1, 60.0), *missing]) == 60.0


@pytest.mark.parametrize(
    ("ranks", "left", "waiting"),
    [
        ([seen(0, 5.0), seen(1, left=True), seen(2), seen(3)], [1], [0]),  # a call of all four
        ([seen(0, 5.0, ranks=2), seen(1, left=True), seen(2), seen(3)], [], []),  # rank 2 may be the other
        ([seen(0, 5.0, ranks=0), seen(1, left=True), seen(2, 4.0, ranks=0), seen(3, left=True)], [1, 3], [0, 2]),
        ([seen(0, 1.0), seen(1, left=True), seen(2), seen(3)], [], []),  # not for long
        ([seen(0, 5.0), seen(1), seen(2), seen(3)], [], []),  # nobody left
        ([seen(0), seen(1, left=True), seen(2), seen(3, left=True)], [], []),  # nobody waits
    ],
)
def test_waiting_for_who_has_left(ranks: list[Seen], left: list[int], waiting: list[int]) -> None:
    """Behaviour 30."""
    found = deserted(ranks, 2.0)
    assert (numbers(found[0]), numbers(found[1])) == (left, waiting)


def test_names() -> None:
    """Behaviour 30: of the ranks that left, with where they were, and where the others wait."""
    text = report_left([seen(1)], [seen(0, 5.0), seen(3, 4.0)])
    assert "rank 1 (node0) left the job at step 7, in phase data: its main program is over" in text
    assert "ranks 0, 3 wait in allreduce, at a.py:3" in text
    assert "ranks 1-2 left" in report_left([seen(1), seen(2)], [seen(0, 5.0)])
    assert named([seen(2)]) == "rank 2 (node1)"
    assert named([seen(rank) for rank in (7, 0, 1, 2, 5)]) == "ranks 0-2, 5, 7"


def test_a_report_says_all() -> None:
    """Behaviour 32."""
    ranks = [seen(0, 70.0), seen(1), seen(2, silent=True), seen(3, 60.0)]
    text = report(ranks, {1: "its main thread:\n  File x\n    load()\n", 2: "its process is stopped"}, 70.0, "The end.")
    assert text.splitlines() == [
        "mpidp: stalled for 70 s after step 7: ranks 1-2 do not arrive.",
        "  ranks 0, 3 wait in allreduce, at a.py:3",
        "  rank 1 on node0: step 7, phase data for 3 s; its main thread:",
        "      File x",
        "        load()",
        "  rank 2 on node1 does not answer: heard of 1 s ago, at step 7, phase data; its process is stopped",
        "  The end.",
    ]


def test_a_thousand_missing_ranks_are_no_thousand_stacks() -> None:
    ranks = [seen(0, 70.0), *(seen(rank) for rank in range(1, 1000))]
    lines = report(ranks, {}, 70.0, "The end.").splitlines()
    assert len(lines) < 15
    assert "ranks 1-999 do not arrive" in lines[0] and "(and 991 more)" in lines[-2]


def test_status_of_phases_and_waits() -> None:
    """Behaviour 32: the outer of two waits counts; an error keeps the phase it came from."""
    status = Status()
    with status.during("data"):
        assert status.phase == "data"
        with status.during("copy", is_long=True):
            assert status.is_long
        assert (status.phase, status.is_long) == ("data", False)
    assert status.phase == "start"
    with status.waiting("barrier", 3), status.waiting("a request"):
        wait = status.longest_wait()
        assert wait is not None and (wait.name, wait.ranks, wait.thread) == ("barrier", 3, threading.get_ident())
    assert status.longest_wait() is None
    with pytest.raises(ZeroDivisionError), status.during("forward"):
        1 / 0  # noqa: B018
    assert status.where() == "at step 0, in phase forward"
    assert status.since <= time.monotonic()


class Watching:
    """Four ranks on two nodes, of which rank 0 watches; keeps what the watch does."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, str, Any]] = []
        self.said: list[str] = []
        self.ended: list[str] = []
        self.clock = 0.0
        self.watch = StallWatch(
            [0, 0, 1, 1], lambda *message: self.sent.append(message), self.said.append, self.ended.append
        )

    def look(
        self,
        wait_s: float,
        missing: list[Seen],
        after_s: float = 1.0,
        limits: tuple[float, float] = (WARNING_S, ABORT_S),
    ) -> None:
        """Ranks that are not missing wait."""
        seen = {rank: Seen(Heartbeat(rank, "node", wait="Allreduce", wait_s=wait_s), 0.5, False) for rank in range(4)}
        self.clock += after_s
        self.watch.look([*(seen | {rank.beat.rank: rank for rank in missing}).values()], self.clock, *limits)


def late(rank: int, *, silent: bool = False, long: bool = False) -> Seen:
    return Seen(Heartbeat(rank, "node", phase="data", is_long=long), 20.0 if silent else 0.5, silent)


def test_a_missing_rank_is_asked_and_its_answer_reported() -> None:
    watching = Watching()
    watching.look(59.0, [late(2)])
    assert not watching.sent
    watching.look(60.0, [late(2)])
    watching.look(61.0, [late(2)])
    assert watching.sent == [(2, ASK, None)] and not watching.said
    watching.watch.answered(2, Look("its main thread:\nload()"))
    watching.look(62.0, [late(2)])
    watching.look(63.0, [late(2)])
    assert len(watching.said) == 1
    assert "rank 2 (node) does not arrive" in watching.said[0] and "load()" in watching.said[0]
    assert f"lasted for {ABORT_S:g} s" in watching.said[0]
    watching.look(0.0, [])
    assert watching.said[1:] == ["mpidp: the stall is over, all ranks go on."] and not watching.ended


def test_a_rank_that_answers_nothing_is_waited_for_a_little() -> None:
    watching = Watching()
    watching.look(60.0, [late(2)])
    watching.look(61.0, [late(2)], after_s=ANSWER_S + 0.1)
    assert "rank 2 on node: step 0, phase data" in watching.said[0]


def test_a_silent_rank_is_looked_at_by_a_neighbour() -> None:
    """Also where it falls silent after it was asked."""
    watching = Watching()
    watching.look(60.0, [late(2)])
    watching.look(61.0, [late(2, silent=True)])
    assert watching.sent == [(2, ASK, None), (3, LOOK, 2)]
    watching = Watching()
    for wait_s in (60.0, 61.0):
        watching.look(wait_s, [late(2, silent=True), late(3, silent=True)])
    assert not watching.sent and watching.said[0].count("and no rank of its node does") == 2


def test_the_job_ends_with_a_report_of_its_own() -> None:
    watching = Watching()
    watching.look(ABORT_S, [late(2)])
    watching.watch.answered(2, Look("its main thread:\nload()"))
    watching.look(ABORT_S + 1, [late(2)])
    assert len(watching.ended) == 1 and "The job ends (stall_abort_s = 600)." in watching.ended[0]
    assert "load()" in watching.ended[0] and not watching.said


@pytest.mark.parametrize("silent", [False, True])
def test_a_long_phase_ends_no_job(silent: bool) -> None:
    """A silent rank is reported all the same, as it may be stopped, and once more whenever the limit has passed."""
    watching = Watching()
    for _ in range(3):
        watching.look(2 * ABORT_S, [late(2, silent=silent, long=True)], after_s=ANSWER_S + 1)
    assert not watching.ended
    assert [text.rpartition("  ")[2] for text in watching.said] == silent * [
        "The job goes on waiting: this phase may take long."
    ]
    for _ in range(4):
        watching.look(3 * ABORT_S, [late(2, silent=silent, long=True)], after_s=ABORT_S / 2 + 1)
    assert not watching.ended
    assert len(watching.said) == 2 * silent


STUCK = [late(2, silent=True, long=True)]
COMPUTES, STOPPED = Look("its process computes"), Look("its process is stopped", is_stopped=True)


def found(watching: Watching, look: Look | None) -> None:
    """The limit passes, a neighbour is asked, and tells that; or nothing in time."""
    watching.look(3 * ABORT_S, STUCK, after_s=ABORT_S + 1)
    watching.look(3 * ABORT_S, STUCK)
    if look is not None:
        watching.watch.answered(2, look)
    watching.look(3 * ABORT_S, STUCK, after_s=ANSWER_S + 1)


@pytest.mark.parametrize("last", [STOPPED, COMPUTES, None])
def test_a_long_phase_does_not_excuse_a_process_that_is_still_stopped(last: Look | None) -> None:
    watching = Watching()
    for look in (COMPUTES, STOPPED, last):
        assert not watching.ended
        found(watching, look)
    assert len(watching.ended) == (last is STOPPED)
    if last is not STOPPED:
        found(watching, STOPPED)
        found(watching, STOPPED)
    assert len(watching.ended) == 1 and "its process is stopped" in watching.ended[0]


def test_a_node_of_which_nothing_is_heard_is_as_good_as_stopped() -> None:
    watching = Watching()
    frozen = [Seen(Heartbeat(rank, "node", phase="data", is_long=True), ABORT_S + 1, is_silent=True) for rank in (2, 3)]
    for _ in range(4):
        watching.look(2 * ABORT_S, frozen, after_s=ABORT_S + 1)
    assert len(watching.ended) == 1 and "and no rank of its node does" in watching.ended[0]


def test_waits_for_a_long_phase_do_not_count_after_it() -> None:
    """Who comes out of it has as much time as anybody else; whoever begins to watch counts from then on."""
    watching = Watching()
    watching.watch.rest(watching.clock)
    watching.look(2 * ABORT_S, [late(2)])
    assert not watching.sent
    watching.look(2 * ABORT_S, [late(2, long=True)])
    for _ in range(2):
        watching.look(2 * ABORT_S, [late(2)], after_s=WARNING_S / 2 - 1)
    assert not watching.sent
    for _ in range(2):
        watching.look(3 * ABORT_S, [late(2)], after_s=ABORT_S)
        watching.watch.answered(2, Look("its main thread:"))
    assert len(watching.ended) == 1


def test_never_is_never() -> None:
    """Behaviour 32: 0 for the warning says nothing, 0 for the end ends nothing."""
    watching = Watching()
    for missing in ([late(2)], STUCK, [late(2)]):
        for _ in range(3):
            watching.look(5 * ABORT_S, missing, after_s=ABORT_S, limits=(0.0, 0.0))
    assert not watching.sent
    for _ in range(3):
        watching.look(5 * ABORT_S, STUCK, after_s=ANSWER_S + 1, limits=(0.0, ABORT_S))
    watching.look(0.0, [], limits=(0.0, ABORT_S))
    assert watching.sent == [(3, LOOK, 2)] and not watching.said
    for _ in range(3):
        watching.look(5 * ABORT_S, [late(2)], after_s=ABORT_S, limits=(WARNING_S, 0.0))
    assert "The job goes on waiting (stall_abort_s = 0)." in watching.said[0] and not watching.ended
