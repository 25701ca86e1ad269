"""Who keeps whom waiting, from what ranks say of themselves, and the words for it."""

import threading
import time

import pytest

from mpidp.world.stall import Beat, Seen, deserted, longest_wait_s, missing_ranks, named, report, waits
from mpidp.world.status import Status


def seen(
    rank: int, wait_s: float = 0.0, *, age_s: float = 1.0, silent: bool = False, left: bool = False, ranks: int = 4
) -> Seen:
    wait = "allreduce" if wait_s else ""
    beat = Beat(
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


def test_names_are_short() -> None:
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
    assert "ranks 1-999 do not arrive" in lines[0] and "(and 991 ranks more)" in lines[-2]
    assert len(waits([seen(0, 5.0)])) == 1


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
