"""The schedule warmup_cosine: its learning rates, what it refuses, and resumes with other settings."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_runs import records, small_run
from torch import nn

from mpidp.config import RunConfig, SchedulerSection, from_dict, to_toml
from mpidp.errors import CheckpointError, ConfigError
from mpidp.train.components import build_scheduler, ignored_settings
from mpidp.validate import validate


def rates(total: int, section: dict[str, Any], steps: int, lr: float = 0.5) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = build_scheduler(SchedulerSection("warmup_cosine", section), optimizer, total)
    assert scheduler is not None
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_without_warm_up() -> None:
    assert rates(4, {}, 7) == pytest.approx([0.5, 0.25 + 0.25 * 0.5**0.5, 0.25, 0.25 - 0.25 * 0.5**0.5, 0, 0, 0])
    assert rates(99, {"total_steps": 2, "min_lr": 0.1}, 4) == pytest.approx([0.5, 0.3, 0.1, 0.1])


@given(st.integers(1, 50), st.integers(0, 49), st.floats(0, 0.5))
def test_it_rises_to_the_learning_rate_and_falls_to_the_lowest(total: int, warmup: int, min_lr: float) -> None:
    if warmup >= total:
        return
    found = rates(total, {"warmup_steps": warmup, "min_lr": min_lr}, total + 2)
    top = max(0, warmup - 1)
    assert found[top] == pytest.approx(0.5)
    assert all(earlier < later for earlier, later in pairwise(found[: top + 1]))
    assert all(earlier >= later for earlier, later in pairwise(found[top:]))
    assert found[-2:] == pytest.approx([min_lr] * 2)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"warmup_steps": 10}, "warmup_steps = 10; expected at least 0 and less than .* 10"),
        ({"warmup_steps": -1}, "warmup_steps = -1"),
        ({"warmup_steps": 1.5}, r"warmup_steps = 1\.5; expected an integer"),
        ({"total_steps": "all"}, "total_steps = 'all'; expected an integer"),
        ({"min_lr": 0.6}, r"min_lr = 0\.6; expected a number from 0 to optimizer\.lr = 0\.5"),
        ({"min_lr": True}, "min_lr = "),
        ({"warm_up": 3}, "warm_up"),
    ],
)
def test_what_is_refused(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rates(10, section, 1)


def test_a_longer_run_takes_the_longer_schedule(tmp_path: Path) -> None:
    """Only the number of steps is saved: nothing that was changed is reported as ignored."""
    schedule = {"scheduler__name": "warmup_cosine", "log__every_steps": 1}
    folder = small_run(tmp_path, train__epochs=1, **schedule)
    small_run(tmp_path, resume=folder, train__epochs=2, **schedule)
    expected = [line["lr"] for line in records(small_run(tmp_path, train__epochs=2, **schedule), "train")]
    assert [line["lr"] for line in records(folder, "train")][5:] == expected[5:]
    before = to_toml(RunConfig(scheduler=SchedulerSection("warmup_cosine", {"warmup_steps": 1})))
    assert ignored_settings(RunConfig(scheduler=SchedulerSection("warmup_cosine")), before) == []
    assert ignored_settings(RunConfig(scheduler=SchedulerSection("StepLR")), before) != []


def test_a_resumed_run_ends_at_the_lowest_rate_though_the_run_file_has_another_highest_one(tmp_path: Path) -> None:
    schedule = {"scheduler__name": "warmup_cosine", "scheduler__arguments": {"min_lr": 0.001}, "log__every_steps": 1}
    folder = small_run(tmp_path, train__epochs=1, optimizer__lr=0.1, **schedule)
    small_run(tmp_path, resume=folder, train__epochs=2, optimizer__lr=0.01, **schedule)
    expected = small_run(tmp_path, train__epochs=2, optimizer__lr=0.1, **schedule)
    assert records(folder, "train")[-1]["lr"] == records(expected, "train")[-1]["lr"] < 0.01


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_a_decay_that_is_refused(decay: float) -> None:
    with pytest.raises(ConfigError, match=r"train\.ema_decay = .*; expected a number in \[0, 1\)"):
        validate(from_dict({"train": {"ema_decay": decay}}))


def test_averages_of_shards_that_may_die_are_refused() -> None:
    train = {"ema_decay": 0.9, "fault_tolerance": "shrink"}
    with pytest.raises(ConfigError, match=r"train\.ema_decay and optimizer\.sharded"):
        validate(from_dict({"train": train, "optimizer": {"sharded": True}}))


def test_a_run_does_not_go_on_with_averages_that_it_never_had(tmp_path: Path) -> None:
    folder = small_run(tmp_path, train__epochs=1)
    with pytest.raises(CheckpointError, match="holds nothing beside the model, this run has ema"):
        small_run(tmp_path, resume=folder, train__ema_decay=0.9)
