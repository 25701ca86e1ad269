"""What rank 0 shows: plain lines in a log file, at most one an interval; a bar on a terminal."""

import sys
import time

import pytest

from mpidp.train.records.progress import Progress


class Clock:
    """A clock that only moves when told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def test_one_line_an_interval(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(True, first_step=0, last_step=100, interval_s=2.0)
    for step in range(1, 11):
        clock.now += 0.5
        progress.update(step, f"loss {step}")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "step 4 of 100" in lines[0] and "loss 4" in lines[0]
    assert "step 8 of 100" in lines[1]


def test_time_left_follows_from_the_steps_of_this_start(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """A resumed run has done its first 90 steps before, in no time at all."""
    progress = Progress(True, first_step=90, last_step=100, interval_s=2.0)
    clock.now += 10
    progress.update(95, "x")
    assert "10 s left" in capsys.readouterr().out


def test_lines_that_stay(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(True, 0, 1, 1000.0)
    progress.line("epoch 1 [bold]  done")
    progress.close()
    assert capsys.readouterr().out == "epoch 1 [bold]  done\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_other_ranks_are_silent(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    progress = Progress(False, 0, 10, 0.001)
    clock.now += 5
    progress.update(1, "x")
    progress.line("y")
    progress.close()
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_a_terminal_gets_a_bar_that_leaves_lines_in_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    progress = Progress(True, 0, 10, 1000.0)
    progress.update(3, "loss 0.5")
    progress.line("epoch 1 [not markup]")
    progress.close()
    progress.close()
    assert "epoch 1 [not markup]\n" in capsys.readouterr().out


def test_a_terminal_without_rich_gets_lines(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    progress = Progress(True, 0, 10, 1.0)
    clock.now += 2
    progress.update(3, "loss 0.5")
    progress.close()
    assert "step 3 of 10" in capsys.readouterr().out
