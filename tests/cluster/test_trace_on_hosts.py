"""Behaviour 48: a trace of ranks on several hosts, whose clocks are far apart, has one time axis."""

import json
import sys
from pathlib import Path

import pytest
from cluster import FOLDER, JOB_TIMEOUT_S, run_on_hosts
from test_world_on_hosts import train_command

pytestmark = pytest.mark.timeout(JOB_TIMEOUT_S + 30)
LAYOUT = (2, 1, 1)
STEPS = 5
WALL_CLOCK_NS = 1_000_000  # between two readings that should be one, on a busy machine


def test_clocks_of_hosts_are_compared() -> None:
    """The measured offsets are right within the bound that they come with, and that is small."""
    found = json.loads(run_on_hosts([sys.executable, FOLDER / "say_clock.py"], ranks_per_host=LAYOUT).stdout)
    assert [round(rank["true_ns"] / 1e9) for rank in found] == [0, 0, -1000, -2000]
    for rank in found:
        assert abs(rank["offset_ns"] - rank["true_ns"]) <= rank["error_ns"] + WALL_CLOCK_NS
        assert rank["error_ns"] < 20_000_000


def test_all_ranks_are_on_one_axis(tmp_path: Path) -> None:
    """Nobody is through a reduction before all have come to it."""
    run_on_hosts([*train_command(tmp_path), f"--log.trace_steps={STEPS}"], ranks_per_host=LAYOUT)
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    hosts = [f"mpidp-h{node + 1}" for node, count in enumerate(LAYOUT) for _ in range(count)]
    assert names == {rank: f"rank {rank} ({host})" for rank, host in enumerate(hosts)}
    assert 0 < trace["otherData"]["clock_error_us"] < 20_000
    reduces = [[e for e in trace["traceEvents"] if e["name"] == "reduce" and e["pid"] == rank] for rank in names]
    assert all(len(of_rank) == STEPS for of_rank in reduces)
    for together in zip(*reduces, strict=True):
        last_start_us = max(event["ts"] for event in together)
        first_end_us = min(event["ts"] + event["dur"] for event in together)
        assert last_start_us <= first_end_us + trace["otherData"]["clock_error_us"]
