"""Jobs killed in the middle and resumed: the same losses as if nothing had happened (Behaviour 43).

An epoch has 160 samples in 6 steps, the last of 10. The model notes the rows that it trains on.
"""

import json
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_workplace

from jobs import Result, finish, kill, launch, run_job
from mpidp.train.checkpoint.read import load, newest

pytestmark = pytest.mark.timeout(300)  # several jobs a test, each with a limit of its own
TIMEOUT_S = 60.0
POLL_S = 0.05
EXACT = ("kind", "step", "epoch", "samples", "loss", "accuracy", "lr")
TRAINING_ROWS, STEPS = 160, 6


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    return make_workplace(tmp_path)


def train(folder: Path, ranks: int, *words: str, seen: str = "") -> Result:
    """Train to the end; `seen` is where rows are noted."""
    environment = {"SEEN": seen} if seen else None
    result = run_job(
        ["-m", "mpidp", "train", "run.toml", *words], ranks, TIMEOUT_S, cwd=folder, environment=environment
    )
    assert result.code == 0, result.output
    return result


def train_and_kill(folder: Path, ranks: int, step: int, *words: str, seen: str = "") -> None:
    """Start to train and kill -9 the whole job in the `step`-th step of this start."""
    (folder / "stopped").unlink(missing_ok=True)
    environment = {"STOP_AT": str(step)} | ({"SEEN": seen} if seen else {})
    job = launch(["-m", "mpidp", "train", "run.toml", *words], ranks, cwd=folder, environment=environment)
    deadline = time.monotonic() + TIMEOUT_S
    while not (folder / "stopped").exists() and job.poll() is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    stopped = (folder / "stopped").exists()
    kill(job)
    result = finish(job)
    assert stopped, result.output
    assert result.code != 0


def records(folder: Path, keys: tuple[str, ...] = EXACT) -> list[list[Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [[record.get(key) for key in keys] for record in map(json.loads, lines)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load(newest(folder / "checkpoints")[0])["model"]


def seen(folder: Path, name: str, ranks: int) -> list[set[int]]:
    """The rows of each global step that all ranks together trained on; none comes twice in a step."""
    lines = [(folder / f"{name}_{rank}").read_text().splitlines() for rank in range(ranks)]
    steps = [[int(row) for line in step for row in line.split()] for step in zip(*lines, strict=True)]
    assert all(len(step) == len(set(step)) for step in steps)
    return [set(step) for step in steps]


@pytest.mark.parametrize(
    ("ranks", "sharded"), [(1, False), (2, False), pytest.param(3, True, marks=pytest.mark.library)]
)
def test_a_run_killed_twice_equals_an_uninterrupted_one_bit_for_bit(workplace: Path, ranks: int, sharded: bool) -> None:
    """Dropout, batch norm, momentum, a schedule; killed after checkpoints in the middle and at the end of an epoch."""
    words = [
        "--checkpoint.every_steps=4",  # 4, 8 and, with the end of the second epoch, 12
        "--checkpoint.background=False",  # complete before the next step, which kills
        "--model.arguments.dropout=0.3",
        "--model.arguments.norm=true",
        "--scheduler.name=CosineAnnealingLR",
        "--scheduler.arguments.T_max=18",
        f"--optimizer.sharded={sharded}",
    ]
    train(workplace, ranks, *words, "--run.name=whole")
    train_and_kill(workplace, ranks, 10, *words)
    assert newest(workplace / "runs/run/checkpoints")[0].name == "step_00000008"
    train_and_kill(workplace, ranks, 14 - 8, *words, "--resume=runs/run")
    assert newest(workplace / "runs/run/checkpoints")[0].name == "step_00000012"
    result = train(workplace, ranks, *words, "--resume=runs/run")
    assert "step 12" in result.output

    whole, resumed = workplace / "runs/whole", workplace / "runs/run"
    assert records(resumed) == records(whole)
    steps = [record[1] for record in records(resumed, ("kind", "step")) if record[0] == "train"]
    assert steps == sorted(set(steps)), "no gap, no repeat"
    assert sum(record[1] for record in records(resumed, ("kind", "samples")) if record[0] == "train") == 3 * 160
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(resumed)[name], tensor), name
    assert sorted(path.name for path in (workplace / "runs").iterdir()) == ["run", "whole"]


@pytest.mark.library
def test_shards_change_no_step_and_are_dealt_anew_at_another_size(workplace: Path) -> None:
    """Behaviour 21: with shards or without, begun or resumed, the same losses; and the same state for plain torch."""
    words = ["--optimizer.name=RMSprop", "--checkpoint.keep=9"]
    train(workplace, 3, *words, "--run.name=plain")
    train(workplace, 3, *words, "--run.name=sharded", "--optimizer.sharded=True")
    plain, sharded = workplace / "runs/plain", workplace / "runs/sharded"
    assert records(sharded) == records(plain)
    for name, tensor in weights(plain).items():
        assert torch.equal(weights(sharded)[name], tensor), name
    exported = [export(workplace, run) for run in (plain, sharded)]
    assert repr(exported[1]) == repr(exported[0])

    def resumed(is_sharded: bool) -> list[list[Any]]:
        folder = shutil.copytree(sharded, workplace / f"runs/resumed_{is_sharded}", symlinks=True)
        shutil.rmtree(folder / "checkpoints/step_00000018")
        train(workplace, 2, *words, f"--resume={folder}", f"--optimizer.sharded={is_sharded}")
        return records(folder)

    assert resumed(True) == resumed(False)


def export(workplace: Path, run: Path) -> Any:
    """The optimizer's state for plain torch, which takes it."""
    path = workplace / f"{run.name}.pt"
    result = run_job(["-m", "mpidp", "checkpoint", "export", run, "--optimizer", f"--output={path}"], 0, TIMEOUT_S)
    assert result.code == 0, result.output
    state = torch.load(path)["optimizer"]
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 5))
    torch.optim.RMSprop(model.parameters()).load_state_dict(state)
    return state


def test_a_run_resumed_at_another_size_takes_the_same_samples_and_losses(workplace: Path) -> None:
    """Behaviours 24, 25: killed on 3 ranks, resumed on 2; and on 1 with another global batch."""
    words = ["--checkpoint.every_steps=4", "--checkpoint.background=False"]
    train(workplace, 2, *words, "--run.name=whole", seen="whole")
    train_and_kill(workplace, 3, 11, *words, seen="killed")
    shutil.copytree(workplace / "runs/run", workplace / "runs/copy")
    train(workplace, 2, *words, "--resume=runs/run", seen="resumed")

    whole, killed = seen(workplace, "whole", 2), seen(workplace, "killed", 3)
    assert killed == whole[:10]
    assert seen(workplace, "resumed", 2) == whole[8:]
    places, numbers = EXACT[:4], ("loss", "accuracy")
    assert records(workplace / "runs/run", places) == records(workplace / "runs/whole", places)
    both = (records(workplace / folder, numbers) for folder in ("runs/run", "runs/whole"))
    for ours, theirs in zip(*both, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    for name, tensor in weights(workplace / "runs/whole").items():
        torch.testing.assert_close(weights(workplace / "runs/run")[name], tensor, rtol=1e-5, atol=1e-6)

    train(workplace, 1, *words, "--resume=runs/copy", "--data.global_batch=45", seen="bigger")
    rest = seen(workplace, "bigger", 1)
    unseen = Counter(row for step in whole[8:] for row in step)
    assert Counter(row for step in rest for row in step) == unseen
    assert [len(step) for step in rest] == [45, 45, 10, 45, 45, 45, 25]
    assert set().union(*rest[:3]) == set().union(*whole[8:12]), "first the unseen samples of the epoch"


@pytest.mark.library
def test_killed_before_the_first_checkpoint(workplace: Path) -> None:
    """There is nothing to resume from: said so, once, and the run folder is as it was."""
    train_and_kill(workplace, 2, 3)
    (workplace / "runs/run/owner.json").unlink()  # of the job that was killed, which the next one removes
    before = sorted(path for path in (workplace / "runs").rglob("*"))
    words = ["-m", "mpidp", "train", "run.toml", "--resume=runs/run"]
    result = run_job(words, 2, TIMEOUT_S, cwd=workplace)
    assert result.code == 1
    assert result.output.count("no checkpoint in") == 1 and "Traceback" not in result.output
    assert sorted(path for path in (workplace / "runs").rglob("*")) == before


@pytest.mark.short
def test_a_damaged_newest_checkpoint_is_passed_over_aloud(workplace: Path) -> None:
    """Behaviours 41, 42: the one before it continues to the same end."""
    words = ["--checkpoint.every_steps=4", "--train.epochs=2"]
    train(workplace, 2, *words)
    expected = records(workplace / "runs/run")
    state = workplace / "runs/run/checkpoints/step_00000012/state.pt"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 4
    state.write_bytes(content)
    result = train(workplace, 2, *words, "--resume=runs/run")
    assert result.output.count("step_00000012: state.pt is damaged") == 1
    assert "step_00000008" in result.output
    assert records(workplace / "runs/run") == expected
    assert newest(workplace / "runs/run/checkpoints")[1] == []
