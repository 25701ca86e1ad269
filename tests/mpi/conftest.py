"""The fixture `world`, and the ranks' agreement after each test on whether it failed anywhere.

Without that agreement a rank that fails a test would go on to the next one while the others still wait in the last.
A rank that never comes makes the test time out on all ranks: faulthandler shows where each one is (pyproject.toml,
faulthandler_timeout), then pytest-timeout ends this rank and, with it, the launcher ends the job.
"""

import time
from collections.abc import Callable, Generator
from functools import cache

import numpy as np
import pytest
from mpi4py import MPI

import mpidp

FAILED = pytest.StashKey[str]()
POLL_S = 0.001
TELL_S = 5.0


@pytest.fixture(scope="session")
def world() -> mpidp.World:
    """The World of the ranks that run these tests."""
    return mpidp.init()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let @pytest.mark.mpi(min_size=...) work with no option; asked this late, pytest-mpi prints no report."""
    session.config.option.with_mpi = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test on every rank if it failed on any."""
    report = yield
    if report.failed:
        item.stash[FAILED] = report.longreprtext
    if report.when == "teardown":  # the one phase that every rank reaches, whatever happened before
        failure = item.stash.get(FAILED, "")
        reporter = item.config.pluginmanager.get_plugin("terminalreporter")
        assert reporter is not None
        ranks = _failed_ranks(bool(failure), tell=lambda: reporter.write_line(_waiting(item.nodeid, failure)))
        if ranks and not failure:
            report.outcome = "failed"
            report.longrepr = f"failed on rank {', '.join(map(str, ranks))} and not on this one"
    return report


def _failed_ranks(failed: bool, tell: Callable[[], None]) -> list[int]:
    """The ranks that failed; calls `tell` once when this one did and the others do not come. Collective."""
    comm = _comm()
    flags = np.zeros(comm.size, dtype=np.uint8)
    request = comm.Iallgather(np.array([failed], dtype=np.uint8), flags)
    start = time.monotonic()
    while not request.Test():
        if failed and time.monotonic() - start > TELL_S:
            failed = False
            tell()
        time.sleep(POLL_S)  # a waiting rank leaves its core to the working ones
    return [int(rank) for rank in np.flatnonzero(flags)]


def _waiting(test: str, failure: str) -> str:
    return f"\n{test} failed on this rank, and the others do not come; they may wait for it.\n{failure}"


@cache
def _comm() -> MPI.Intracomm:
    """A communicator that no test can disturb. Collective at the first call."""
    return MPI.COMM_WORLD.Dup()
