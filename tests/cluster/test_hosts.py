"""The laboratory itself: bytes between hosts cross the limited links, and nothing is left of a job or of the hosts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import FOLDER, JOB_TIMEOUT_S, RATE, JobFailedError, hosts_down, hosts_up, run_on_hosts

pytestmark = pytest.mark.timeout(JOB_TIMEOUT_S + 30)
NUM_BYTES = 8 << 20


def sent_bytes(hosts: int, ranks_per_host: int) -> list[int]:
    """Bytes that the host of each rank sent while all summed a buffer of `NUM_BYTES`."""
    command: list[str | Path | int] = [sys.executable, FOLDER / "count_traffic.py", NUM_BYTES]
    counts: list[int] = json.loads(run_on_hosts(command, hosts, ranks_per_host).stdout)
    return counts


def listing(*command: str) -> str:
    """What a command prints."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def test_no_transport_bypasses_the_links_between_hosts() -> None:
    """A sum needs at least bytes * (n-1)/n to leave each host; shared memory of the machine would show none."""
    assert min(sent_bytes(hosts=4, ranks_per_host=1)) >= NUM_BYTES * 3 // 4


def test_ranks_of_one_host_share_memory() -> None:
    assert max(sent_bytes(hosts=1, ranks_per_host=2)) < NUM_BYTES // 100


def test_links_are_limited_in_both_directions() -> None:
    inside = listing("ip", "netns", "exec", "mpidp-h1", "tc", "qdisc", "show", "dev", "eth0")
    outside = listing("tc", "qdisc", "show", "dev", "mpidp-p1")
    assert RATE in inside.lower() and RATE in outside.lower()


def test_a_job_that_hangs_is_killed_with_all_its_processes() -> None:
    with pytest.raises(JobFailedError, match=r"did not end within 2 s"):
        run_on_hosts(["sleep", "3600"], ranks_per_host=2, timeout_s=2)
    assert [listing("ip", "netns", "pids", f"mpidp-h{number}") for number in range(1, 5)] == [""] * 4


def test_the_exit_code_and_the_output_of_a_job_are_reported() -> None:
    with pytest.raises(JobFailedError, match=r"ended with exit code 3\n(.*\n)*mpidp-h1"):
        run_on_hosts(["sh", "-c", "hostname; exit 3"], hosts=1)


def test_down_leaves_nothing() -> None:
    try:
        hosts_down()
        assert "mpidp" not in listing("ip", "netns") + listing("ip", "link") + listing("ip", "route")
        assert not list(Path("/etc/netns").glob("mpidp*"))
        assert "mpidp" not in Path("/etc/hosts").read_text()
    finally:
        hosts_up()
