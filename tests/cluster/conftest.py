"""Bring the hosts of hosts.sh up for the tests of this folder, and remove them afterwards.

What tests/faults has for jobs that fail is used here, too, with a launcher that starts them on the hosts.
"""

import fcntl
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from cluster import ENVIRONMENT, FOLDER, hosts_down, hosts_up, missing, mpiexec

sys.path.insert(0, str(FOLDER.parent / "faults"))
LOCK = Path(tempfile.gettempdir()) / "mpidp_hosts.lock"


@pytest.fixture(scope="session", autouse=True)
def hosts() -> Iterator[None]:
    """Bring up the hosts, or skip all tests with the reason; in CI (CI=true) that is a failure."""
    give_up = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
    lacking = missing()
    if lacking:
        give_up(f"four-host tests: {lacking}")
    with LOCK.open("w") as lock:  # the hosts' names are the machine's: one run of this folder at a time
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            hosts_up()
        except RuntimeError as error:
            give_up(f"four-host tests: {error}")
        yield
        hosts_down()


@pytest.fixture
def use_hosts(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[int]], None]:
    """Called with the ranks of each host, makes the jobs that follow run there (`jobs.launch` of tests/faults)."""

    def use(ranks_per_host: Sequence[int]) -> None:
        for name, value in (ENVIRONMENT | {"MPIEXEC": shlex.join(mpiexec(ranks_per_host))}).items():
            monkeypatch.setenv(name, value)

    return use
