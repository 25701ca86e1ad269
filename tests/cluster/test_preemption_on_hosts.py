"""A training on several hosts that is asked to stop by a signal to one rank, and goes on with other ranks elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from cluster import JOB_TIMEOUT_S
from test_preemption import EPOCHS, STEPS, TRAIN, check_stopped, records
from tiny import make_workplace

from jobs import Result, run_job

pytestmark = pytest.mark.timeout(4 * JOB_TIMEOUT_S)
ROUNDING = 1e-9  # in float64 losses of different numbers of ranks differ by rounding only
ASKED = '''
"""The model, of which one rank gets a signal in one of its steps."""

import os
import signal

import own


class Net(own.Net):
    def forward(self, x):
        y = super().forward(x)
        if self.training and f"{own.RANK} {self.step}" == os.environ.get("AT"):
            os.kill(os.getpid(), getattr(signal, os.environ["SIGNAL"]))
        return y
'''


def test_one_rank_is_asked_and_all_stop(tmp_path: Path, use_hosts: Callable[[Sequence[int]], None]) -> None:
    """Behaviours 25, 45: saved after the same step, with 75; resumed on other layouts, the losses are the same."""
    (make_workplace(tmp_path) / "slow.py").write_text(ASKED)

    def train(layout: Sequence[int], *words: str, **environment: str) -> Result:
        use_hosts(layout)
        words = (*TRAIN, "--train.precision=float64", "--log.every_steps=1", *words)
        return run_job(words, sum(layout), JOB_TIMEOUT_S, cwd=tmp_path, environment=environment)

    whole = train((), "--run.name=whole")
    assert whole.code == 0, whole.output
    first = train((1, 1, 1, 1), AT="3 5", SIGNAL="SIGTERM")
    step = check_stopped(tmp_path, first, "SIGTERM")
    assert 5 <= step < 10
    second = train((1, 2), "--resume=auto", AT="2 4", SIGNAL="SIGUSR2")
    assert step + 4 <= check_stopped(tmp_path, second, "SIGUSR2") < STEPS * EPOCHS
    third = train((1, 1), "--resume=auto")
    assert third.code == 0, third.output

    for kind, number in (("train", STEPS * EPOCHS), ("validation", EPOCHS)):
        resumed, uninterrupted = (
            [(record["step"], record["samples"], record["loss"]) for record in records(tmp_path / "runs" / name, kind)]
            for name in ("run", "whole")
        )
        assert len(uninterrupted) == number
        assert [places for *places, _ in resumed] == [places for *places, _ in uninterrupted]
        assert [loss for *_, loss in resumed] == pytest.approx([loss for *_, loss in uninterrupted], rel=ROUNDING)
