"""Rows in the memory of several hosts, and files staged on them: what tests/mpi says of one host holds there too."""

import sys
from pathlib import Path

import pytest
from cluster import FOLDER, JOB_TIMEOUT_S, JobFailedError, run_on_hosts

pytestmark = pytest.mark.timeout(2 * JOB_TIMEOUT_S + 30)
FILES = ("test_remote_rows.py", "test_held.py", "test_staging.py")


@pytest.mark.parametrize("layout", [(1, 1, 1, 1), (3, 1)], ids=str)
def test_memory_and_copies(layout: tuple[int, ...], tmp_path: Path) -> None:
    """Behaviours 23, 24, 27 and 29: messages between hosts, windows within them, errors of one host on all."""
    tests = FOLDER.parent
    files = [tests / "mpi" / name for name in FILES]
    # A base folder for each rank's pytest: the default one is numbered, and ranks that start together race for numbers.
    command = [sys.executable, tests / "run_tests.py", "--as-rank", tmp_path, "-q", "-p", "no:cacheprovider", *files]
    try:
        output = run_on_hosts(command, ranks_per_host=layout, timeout_s=2 * JOB_TIMEOUT_S).stdout
    except JobFailedError as error:
        for log in sorted(tmp_path.glob("rank_*.log")):
            error.add_note(f"-- {log.name}\n{log.read_text(errors='replace')}")
        raise
    assert " passed" in output and " failed" not in output
