"""`mpidp doctor` on several hosts: their facts and their clocks in one report."""

import json
import sys
from pathlib import Path

import pytest
from cluster import JOB_TIMEOUT_S, run_on_hosts

pytestmark = pytest.mark.timeout(JOB_TIMEOUT_S + 30)


@pytest.mark.parametrize("layout", [(1, 1, 1, 1), (3, 1)], ids=str)
def test_hosts_are_compared(layout: tuple[int, ...]) -> None:
    """Behaviour 46: hosts of one machine have one clock."""
    report = json.loads(run_on_hosts([sys.executable, "-m", "mpidp", "doctor", "--json"], ranks_per_host=layout).stdout)
    places = [f"mpidp-h{node + 1}" for node, count in enumerate(layout) for _ in range(count)]
    assert [rank["system"]["host"] for rank in report["ranks"]] == places
    (clocks,) = (finding for finding in report["findings"] if finding["code"] == "job.clocks")
    assert clocks["level"] == "OK", clocks
    assert not [finding for finding in report["findings"] if finding["level"] == "FAIL"]


def test_a_file_that_no_host_has(tmp_path: Path) -> None:
    """Behaviour 29: the failure is the job's exit code, and is said once."""
    words = [sys.executable, "-m", "mpidp", "doctor", tmp_path / "no.h5"]
    result = run_on_hosts(words, ranks_per_host=(1, 1), check=False)
    assert result.returncode == 3, result.stdout + result.stderr
    assert result.stdout.count("FAIL  data") == 1
