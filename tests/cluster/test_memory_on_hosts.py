"""Rows in the memory of several hosts, and files staged on them: what tests/mpi says of one host holds there too."""

import sys

import pytest
from cluster import FOLDER, JOB_TIMEOUT_S, run_on_hosts

pytestmark = pytest.mark.timeout(2 * JOB_TIMEOUT_S + 30)
FILES = ("test_remote_memory.py", "test_held.py", "test_staging.py")


@pytest.mark.parametrize("layout", [(1, 1, 1, 1), (3, 1)], ids=str)
def test_memory_and_copies(layout: tuple[int, ...]) -> None:
    """Behaviours 23, 24, 27 and 29: gets and messages between hosts, windows within them, errors of one host on all."""
    files = [FOLDER.parent / "mpi" / name for name in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    output = run_on_hosts(command, ranks_per_host=layout, timeout_s=2 * JOB_TIMEOUT_S).stdout
    assert " passed" in output and " failed" not in output
