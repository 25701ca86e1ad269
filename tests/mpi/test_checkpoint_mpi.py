"""Checkpoints of several ranks: one file a rank, one outcome for all, and the newest that all can read."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mpidp
from mpidp.errors import CheckpointError
from mpidp.train.checkpoint import write as module
from mpidp.train.checkpoint.read import load, newest, newest_readable, part_name, read
from mpidp.train.checkpoint.saver import Saver

pytestmark = pytest.mark.mpi


def save(saver: Saver, step: int) -> None:
    rank = saver.world.rank
    saver.save(step, lambda: {"step": step, "weight": torch.full((9,), float(step))}, lambda: {"rank": rank})


def poll_until_done(saver: Saver, limit: int = 30_000) -> int:
    """Steps of a millisecond until the checkpoint is complete."""
    for polls in range(1, limit):
        time.sleep(0.001)
        saver.poll()
        if not saver.is_busy:
            return polls
    raise AssertionError("it does not end")


@pytest.mark.parametrize("background", [True, False])
def test_every_rank_writes_its_file(world: mpidp.World, mpi_tmp_path: Path, background: bool) -> None:
    saver = Saver(world, mpi_tmp_path, 2, background=background)
    for step in (1, 2, 3):
        save(saver, step)
        if background and step < 3:
            poll_until_done(saver)
    saver.finish()
    saver.close()
    path, passed_over = newest_readable(world, mpi_tmp_path)
    assert (path.name, passed_over) == ("step_00000003", [])
    assert load(path)["weight"].tolist() == [3.0] * 9
    assert read(path, part_name(world.rank)) == {"rank": world.rank}
    assert sorted(file.name for file in path.iterdir()) == sorted(
        ["manifest.json", "state.pt", *(part_name(rank) for rank in range(world.size))]
    )
    assert len(list(mpi_tmp_path.glob("step_*"))) == 2


def test_all_ranks_learn_of_the_end_after_the_same_step(world: mpidp.World, mpi_tmp_path: Path) -> None:
    saver = Saver(world, mpi_tmp_path, 2)
    for step in (1, 2, 3):
        save(saver, step)
        polls = world.comm.allgather(poll_until_done(saver))
        assert len(set(polls)) == 1
    saver.close()


@pytest.mark.parametrize("failing", [0, -1])
@pytest.mark.parametrize("on_failure", ["stop", "warn"])
def test_a_failure_of_one_rank_is_the_same_exception_on_all_at_the_same_step(
    world: mpidp.World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, on_failure: str
) -> None:
    """Behaviour 44: caught, it leaves the ranks in step, and the next checkpoint is written."""
    failing %= world.size
    saver = Saver(world, mpi_tmp_path, 3, on_failure=on_failure)
    save(saver, 1)
    saver.finish()
    if world.rank == failing:
        monkeypatch.setattr(module, "write_part", _refuse)
    save(saver, 2)
    polls, text = 0, ""
    while saver.is_busy:
        polls += 1
        try:
            saver.poll()
        except CheckpointError as error:
            text = "\n".join([str(error), *error.__notes__])
    text = text or "\n".join([str(saver.failure), *saver.failure.__notes__])  # type: ignore[union-attr]
    assert len(set(world.comm.allgather((polls, text)))) == 1
    assert "input/output error" in text and part_name(failing) in text and f"on rank {failing} of" in text
    assert "step_00000001 stays the newest" in text
    assert newest(mpi_tmp_path)[0].name == "step_00000001"
    monkeypatch.undo()
    save(saver, 3)
    saver.finish()
    saver.close()
    assert saver.failure is None
    assert newest(mpi_tmp_path)[0].name == "step_00000003"
    assert not list(mpi_tmp_path.glob(".partial-*"))


def _refuse(path: Path, state: dict[str, Any]) -> None:
    raise OSError(5, os.strerror(5), str(path))


@pytest.mark.mpi(min_size=2)
def test_a_file_that_rank_0_cannot_see(world: mpidp.World, mpi_tmp_path: Path, tmp_path: Path) -> None:
    """Rank 1 writes to a folder of the same name on a file system of its own."""
    folder = tmp_path if world.rank == 1 else mpi_tmp_path
    saver = Saver(world, folder, 3)
    save(saver, 1)
    with pytest.raises(CheckpointError, match="all nodes share") as caught:
        saver.finish()
    assert "rank_00001.pt is not there, seen from rank 0" in str(caught.value)
    saver.close()


Damage = Callable[[Path], object]
DAMAGES: dict[str, Damage] = {
    "the common state": lambda path: os.truncate(path / "state.pt", 99),
    "the rank's own file": lambda path: (path / part_name(mpidp.init().rank)).unlink(),
    "the manifest": lambda path: (path / "manifest.json").write_text("{}"),
    "all of it": lambda path: path.rename(path.with_name("gone")),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("blind", [0, -1])
def test_one_rank_cannot_read_the_newest(
    world: mpidp.World, mpi_tmp_path: Path, tmp_path: Path, damage: str, blind: int
) -> None:
    """Behaviour 41: all fall back together to the newest that all can read, and say which rank could not."""
    blind %= world.size
    saver = Saver(world, mpi_tmp_path, 3, background=False)
    for step in (1, 2):
        save(saver, step)
    saver.close()
    folder = mpi_tmp_path
    if world.rank == blind:  # sees a file system of its own
        folder = tmp_path / "own"
        shutil.copytree(mpi_tmp_path, folder, symlinks=True, ignore=shutil.ignore_patterns("own"))
        DAMAGES[damage](folder / "step_00000002")
    path, passed_over = newest_readable(world, folder)
    assert path.name == "step_00000001"
    (line,) = passed_over
    assert line.startswith("step_00000002: ") and f"seen by rank {blind} on {world.host}" in line
    assert len(set(world.comm.allgather((line, path.name)))) == 1


def test_nothing_readable_is_an_error_on_all_ranks(world: mpidp.World, mpi_tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        newest_readable(world, mpi_tmp_path)
    saver = Saver(world, mpi_tmp_path, 3, background=False)
    save(saver, 1)
    saver.close()
    world.barrier()
    if world.rank == 0:
        (mpi_tmp_path / "step_00000001/state.pt").unlink()
    world.barrier()
    with pytest.raises(CheckpointError, match=r"no usable checkpoint.*state.pt is missing"):
        newest_readable(world, mpi_tmp_path)
