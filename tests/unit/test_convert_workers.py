"""The processes that encode for `mpidp data convert`: a killed one never leaves its parent waiting."""

from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import pytest

from mpidp.errors import DataError
from mpidp.hdf5.write.write_filters import parse_filters
from mpidp.tools.convert import workers as convert_workers
from mpidp.tools.convert.arrays import open_npy
from mpidp.tools.convert.plan import Layout, Plan, make_plan
from mpidp.tools.convert.source import Source

ROWS, ROW_BYTES = 4096, 4096  # four tasks of 4 MiB, more than any pipe takes at once


@pytest.fixture
def team(monkeypatch: pytest.MonkeyPatch) -> list[convert_workers._Worker]:
    """The workers that the test's calls hire."""
    hired: list[convert_workers._Worker] = []
    hire = convert_workers._hire

    def hire_and_tell(source: Source, plan: Plan) -> convert_workers._Worker:
        hired.append(hire(source, plan))
        return hired[-1]

    monkeypatch.setattr(convert_workers, "_hire", hire_and_tell)
    return hired


@pytest.fixture
def work(tmp_path: Path) -> tuple[Source, Plan]:
    np.save(tmp_path / "x.npy", np.zeros((ROWS, ROW_BYTES), np.uint8))
    source = open_npy([str(tmp_path / "x.npy")])
    plan = make_plan(source, Layout(parse_filters("none", shuffle=False, fletcher32=False)), 1 << 30, 2)
    assert len(plan.tasks) == 4
    return source, plan


def test_a_worker_killed_in_the_middle_of_an_answer_is_an_error(
    team: list[convert_workers._Worker], work: tuple[Source, Plan]
) -> None:
    """The second worker has begun to answer, and cannot have ended, when it dies."""
    answers = convert_workers.encode_all(*work, work[1].tasks, 2)
    first, _ = next(answers)
    other = next(worker for worker in team if worker.tasks[0].number == 1 - first.number)
    assert wait([other.pipe], 30)
    other.process.kill()
    other.process.join()
    with pytest.raises(DataError, match="a worker process was killed"):
        list(answers)
    assert not any(worker.process.is_alive() for worker in team)
