"""Start the Slurm of slurm.sh for the tests of this folder, and stop it afterwards."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, missing
from workplace import make_workplace

LOCK = Path(tempfile.gettempdir()) / "mpidp_slurm.lock"
FOLDER = Path(tempfile.gettempdir()) / "mpidp_slurm"  # always the same: what a killed run left there is ended first
PATIENCE_S = 240  # a job waits for another to end, for Slurm to notice something, and for ranks to import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.timeout(PATIENCE_S))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A Slurm of two nodes, or a skip with the reason; in CI (CI=true) that is a failure."""
    give_up = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
    lacking = missing()
    if lacking:
        give_up(f"Slurm tests: {lacking}")
    with LOCK.open("w") as lock:  # the daemons' ports are the machine's: one run of this folder at a time
        fcntl.flock(lock, fcntl.LOCK_EX)
        cluster = Cluster(FOLDER)
        try:
            cluster.up()
        except RuntimeError as error:
            give_up(f"Slurm tests: {error}")
        try:
            yield cluster
        finally:
            cluster.down()
            shutil.rmtree(FOLDER)


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder with run.toml, a model that can be slowed down, and the project's job scripts, filled in."""
    return make_workplace(tmp_path)


@pytest.fixture(autouse=True)
def no_jobs_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that failed half-way must not keep the nodes of the next."""
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").cancel_all()
