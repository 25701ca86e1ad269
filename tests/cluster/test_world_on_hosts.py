"""Ranks, nodes and training on several hosts, with one, two and unequal numbers of ranks a host."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import FOLDER, JOB_TIMEOUT_S, LAYOUTS, run_on_hosts

pytestmark = pytest.mark.timeout(JOB_TIMEOUT_S + 30)
# Nothing here depends on the number of ranks; in float64 losses of different numbers of ranks differ by rounding only.
RUN_FILE = """
data = { train = "data/digits.h5", validation_fraction = 0.2, global_batch = 64 }
model = { name = "mlp" }
optimizer = { lr = 3e-3 }
train = { epochs = 1, dtype = "float64" }
checkpoint = { every_epochs = 0 }
log = { every_steps = 1 }
"""
ROUNDING = 1e-9  # rounding grows over the steps; a lost or doubled sample changes the third digit


def train_command(folder: Path) -> list[str]:
    """The words that train digits for one epoch; the run folder is `folder/run`."""
    run_file = folder / "run.toml"
    run_file.write_text(RUN_FILE)
    return [sys.executable, "-m", "mpidp", "train", str(run_file), f"--run.folder={folder}"]


def losses(folder: Path) -> list[float]:
    """The loss of each step, and the last one on the samples held out."""
    return [json.loads(line)["loss"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def losses_of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("one_rank")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(train_command(folder), env=environment, check=True, timeout=JOB_TIMEOUT_S)
    return losses(folder)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_knows_its_place(layout: tuple[int, ...]) -> None:
    """Nodes are numbered by their lowest rank, ranks of a node in the order of ranks."""
    worlds = json.loads(run_on_hosts([sys.executable, FOLDER / "say_world.py"], ranks_per_host=layout).stdout)
    places = [(node, local) for node, count in enumerate(layout) for local in range(count)]
    assert worlds == [
        {
            "rank": rank,
            "size": sum(layout),
            "local_rank": local,
            "local_size": layout[node],
            "node": node,
            "num_nodes": len(layout),
            "host": f"mpidp-h{node + 1}",
        }
        for rank, (node, local) in enumerate(places)
    ]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_gives_the_losses_of_one_rank(
    layout: tuple[int, ...], losses_of_one_rank: list[float], tmp_path: Path
) -> None:
    """Behaviours 7 and 24: the same global batches and the same steps."""
    run_on_hosts(train_command(tmp_path), ranks_per_host=layout)
    assert len(losses_of_one_rank) > 20
    assert losses(tmp_path) == pytest.approx(losses_of_one_rank, rel=ROUNDING)
