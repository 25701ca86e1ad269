"""Every reducer, dtype and comm_dtype on several hosts, with one, two and unequal numbers of ranks a host."""

import json
import sys

import pytest
from check_reducers import FORMATS, NAMES
from cluster import FOLDER, JOB_TIMEOUT_S, LAYOUTS, run_on_hosts

pytestmark = pytest.mark.timeout(JOB_TIMEOUT_S + 30)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_reducer_gives_the_mean(layout: tuple[int, ...]) -> None:
    """Behaviours 1, 2, 4 and 8."""
    checked = json.loads(run_on_hosts([sys.executable, FOLDER / "check_reducers.py"], ranks_per_host=layout).stdout)
    assert len(checked) == len(NAMES) * len(FORMATS)
    assert {name for name, *_ in checked} == set(NAMES) >= {"naive", "flat", "node"}
