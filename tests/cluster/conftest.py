"""Nothing in; the hosts of hosts.sh are up during the tests of this folder, and gone after them."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import hosts_down, hosts_up, missing

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
