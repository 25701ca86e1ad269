"""Jobs on several hosts, with one, two and unequal numbers of ranks a host: places, clocks, sums, memory, training."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from check_reducers import FORMATS, NAMES
from cluster import FOLDER, JOB_TIMEOUT_S, LAYOUTS, JobFailedError, run_on_hosts

pytestmark = pytest.mark.timeout(2 * JOB_TIMEOUT_S + 30)
# Nothing here depends on the number of ranks; in float64 losses of different numbers of ranks differ by rounding only.
RUN_FILE = """
data = { train = "data/digits.h5", validation_fraction = 0.2, global_batch = 64 }
model = { name = "mlp" }
optimizer = { lr = 3e-3 }
train = { epochs = 1, precision = "float64" }
checkpoint = { every_epochs = 0 }
log = { every_steps = 1, trace_steps = 5 }
"""
ROUNDING = 1e-9  # rounding grows over the steps; a lost or doubled sample changes the third digit
WALL_CLOCK_NS = 1_000_000  # between two readings that should be one, on a busy machine
CLOCK_ERROR_NS = 20_000_000


def host_names(layout: tuple[int, ...]) -> list[str]:
    """The host of each rank."""
    return [f"mpidp-h{node + 1}" for node, count in enumerate(layout) for _ in range(count)]


def train_command(folder: Path) -> list[str]:
    """The words that train digits for one epoch; the run folder is `folder/run`."""
    run_file = folder / "run.toml"
    run_file.write_text(RUN_FILE)
    return [sys.executable, "-m", "mpidp", "train", str(run_file), f"--run.folder={folder}"]


def losses(folder: Path) -> list[float]:
    """The loss of each step, and the last one on the samples held out."""
    return [json.loads(line)["loss"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def losses_of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("one_rank")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(train_command(folder), env=environment, check=True, timeout=JOB_TIMEOUT_S)
    return losses(folder)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_knows_its_place_and_its_clock(layout: tuple[int, ...]) -> None:
    """Nodes are numbered by their lowest rank, ranks of a node in the order of ranks.

    The measured offsets of clocks are right within the bound that they come with, and that is small.
    """
    said = json.loads(run_on_hosts([sys.executable, FOLDER / "say_world.py"], ranks_per_host=layout).stdout)
    places = [(node, local) for node, count in enumerate(layout) for local in range(count)]
    assert [rank["world"] for rank in said] == [
        [rank, sum(layout), local, layout[node], node, len(layout), host]
        for rank, ((node, local), host) in enumerate(zip(places, host_names(layout), strict=True))
    ]
    assert [round(rank["true_ns"] / 1e9) for rank in said] == [-1000 * node for node, _ in places]
    for rank in said:
        assert abs(rank["offset_ns"] - rank["true_ns"]) <= rank["error_ns"] + WALL_CLOCK_NS
        assert rank["error_ns"] < CLOCK_ERROR_NS


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_reducer_gives_the_mean(layout: tuple[int, ...]) -> None:
    """Behaviours 1, 2, 4 and 8."""
    checked = json.loads(run_on_hosts([sys.executable, FOLDER / "check_reducers.py"], ranks_per_host=layout).stdout)
    assert len(checked) == len(NAMES) * len(FORMATS)
    assert {name for name, *_ in checked} == set(NAMES) >= {"naive", "flat", "node"}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_gives_the_losses_of_one_rank(
    layout: tuple[int, ...], losses_of_one_rank: list[float], tmp_path: Path
) -> None:
    """Behaviours 7 and 24: the same global batches and the same steps; 48: one trace of all ranks."""
    run_on_hosts(train_command(tmp_path), ranks_per_host=layout)
    assert len(losses_of_one_rank) > 20
    assert losses(tmp_path) == pytest.approx(losses_of_one_rank, rel=ROUNDING)
    check_one_axis(json.loads((tmp_path / "run" / "trace.json").read_text()), host_names(layout))


def check_one_axis(trace: dict[str, Any], hosts: list[str]) -> None:
    """Clocks of hosts are far apart, and yet nobody is through a reduction before all have come to it."""
    events, error_us = trace["traceEvents"], trace["otherData"]["clock_error_us"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {rank: f"rank {rank} ({host})" for rank, host in enumerate(hosts)}
    assert 0 < error_us < CLOCK_ERROR_NS / 1e3
    reduces = [[event for event in events if event["name"] == "reduce" and event["pid"] == rank] for rank in names]
    assert all(len(of_rank) == 5 for of_rank in reduces)
    for together in zip(*reduces, strict=True):
        last_start_us = max(event["ts"] for event in together)
        first_end_us = min(event["ts"] + event["dur"] for event in together)
        assert last_start_us <= first_end_us + error_us


@pytest.mark.parametrize("layout", [(1, 1, 1, 1), (3, 1)], ids=str)
def test_memory_and_copies(layout: tuple[int, ...], tmp_path: Path) -> None:
    """Behaviours 23, 24, 27 and 29: messages between hosts, windows within them, errors of one host on all."""
    tests = FOLDER.parent
    files = [tests / "mpi" / name for name in ("test_remote_rows.py", "test_held.py", "test_staging.py")]
    # A base folder for each rank's pytest: the default one is numbered, and ranks that start together race for numbers.
    command = [sys.executable, tests / "run_tests.py", "--as-rank", tmp_path, "-q", "-p", "no:cacheprovider", *files]
    try:
        output = run_on_hosts(command, ranks_per_host=layout, timeout_s=2 * JOB_TIMEOUT_S).stdout
    except JobFailedError as error:
        for log in sorted(tmp_path.glob("rank_*.log")):
            error.add_note(f"-- {log.name}\n{log.read_text(errors='replace')}")
        raise
    assert " passed" in output and " failed" not in output


@pytest.mark.parametrize("layout", [(1, 1, 1, 1), (3, 1)], ids=str)
def test_doctor_compares_hosts(layout: tuple[int, ...]) -> None:
    """Behaviour 46: hosts of one machine have one wall clock."""
    report = json.loads(run_on_hosts([sys.executable, "-m", "mpidp", "doctor", "--json"], ranks_per_host=layout).stdout)
    assert [rank["system"]["host"] for rank in report["ranks"]] == host_names(layout)
    (clocks,) = (finding for finding in report["findings"] if finding["code"] == "job.clocks")
    assert clocks["level"] == "OK", clocks
    assert not [finding for finding in report["findings"] if finding["level"] == "FAIL"]


def test_doctor_misses_a_file_that_no_host_has(tmp_path: Path) -> None:
    """Behaviour 29: the failure is the job's exit code, and is said once."""
    words = [sys.executable, "-m", "mpidp", "doctor", tmp_path / "no.h5"]
    result = run_on_hosts(words, ranks_per_host=(1, 1), check=False)
    assert result.returncode == 3, result.stdout + result.stderr
    assert result.stdout.count("FAIL  data") == 1
