"""The plan of `staged`, played through on imagined streams, looking for hazards."""

import pytest

from mpidp.reduce.staged import Step, staged_plan


class Streams:
    """Two streams and a host: what the plan does not order may come in any order."""

    def __init__(self, steps: list[Step]) -> None:
        self.steps = steps

    def before(self, step: Step) -> set[tuple[str, int]]:
        """What is certainly done when a step runs."""
        done: set[tuple[str, int]] = set()
        position = self.steps.index(step)
        earlier = self.steps[:position]
        # The host returns from a reduction before it issues anything else.
        sure = [other for other in earlier if other.action == "reduce"]
        # A stream works in the order of issue.
        sure += [other for other in earlier if other.action == step.action]
        sure += [other for other in earlier if (other.action, other.piece) == step.after]
        for other in sure:
            done |= {(other.action, other.piece)} | self.before(other)
        return done


@pytest.mark.parametrize("num_pieces", range(1, 8))
def test_no_buffer_is_overwritten_or_read_too_early(num_pieces: int) -> None:
    steps = staged_plan(num_pieces)
    streams = Streams(steps)
    for step in steps:
        done = streams.before(step)
        if step.action == "down":  # the buffer's former piece has left it
            former = [s for s in steps if s.action == "up" and s.buffer == step.buffer and s.piece < step.piece]
            assert {(s.action, s.piece) for s in former} <= done
        if step.action == "reduce":
            assert ("down", step.piece) in done
        if step.action == "up":
            assert ("reduce", step.piece) in done


@pytest.mark.parametrize("num_pieces", range(8))
def test_every_piece_goes_down_is_reduced_and_goes_up_once(num_pieces: int) -> None:
    steps = staged_plan(num_pieces)
    for action in ("down", "reduce", "up"):
        assert [step.piece for step in steps if step.action == action] == list(range(num_pieces))


def test_a_copy_down_is_issued_before_the_reduction_of_the_piece_before() -> None:
    """Otherwise nothing would overlap."""
    order = [(step.action, step.piece) for step in staged_plan(3)]
    assert order.index(("down", 1)) < order.index(("reduce", 0))
    assert order.index(("up", 0)) < order.index(("reduce", 1))
