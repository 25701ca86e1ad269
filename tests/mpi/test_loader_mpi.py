"""`HDF5Loader` on real ranks: the same global batches at any size, and errors on every rank."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812  # the name every PyTorch program gives it

from mpidp.errors import DataError, MismatchError
from mpidp.hdf5.loader import HDF5Loader, Mode
from mpidp.hdf5.order import Shuffle
from mpidp.world.world import World

pytestmark = pytest.mark.sizes

SHUFFLES: tuple[Shuffle, ...] = ("streams", "full", "none")
ROWS = 203


@pytest.fixture
def path(world: World, tmp_path: Path) -> Iterator[Path]:
    """A file that rank 0 writes, seen by all: row i holds x = [i, -i], y = i % 3."""
    path = Path(world.broadcast(str(tmp_path / "data.h5")))
    if world.rank == 0:
        i = np.arange(ROWS)
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=np.stack([i, -i], 1).astype("f4"), chunks=(8, 2), compression="gzip")
            file.create_dataset("y", data=(i % 3).astype("i8"), chunks=(16,))
    world.barrier()
    yield path
    world.barrier()


def make(path: Path, world: World, **options: Any) -> HDF5Loader:
    return HDF5Loader(path, **{"fields": ("x", "y"), "global_batch": 16, "streams": 8, "world": world, **options})


def global_rows(world: World, indices: np.ndarray) -> list[int]:
    """Return the row numbers of all ranks, sorted."""
    return sorted(np.concatenate(world.comm.allgather(indices)).tolist())


@pytest.mark.parametrize("global_batch", [1, 16])
def test_weighed_gradients_average_to_those_of_one_rank(world: World, path: Path, global_batch: int) -> None:
    """Behaviours 7 and 16: the plain mean over ranks, some without samples, is the mean over the batch."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 3).double()
    batch = next(iter(make(path, world, global_batch=global_batch)))
    whole = next(iter(make(path, World.alone(), global_batch=global_batch)))
    batch.weigh(F.cross_entropy(model(batch.x.double() / ROWS), batch.y)).backward()
    gradient = model.weight.grad
    found = np.zeros((3, 2)) if gradient is None else gradient.numpy().copy()
    found = sum(world.comm.allgather(found)) / world.size
    model.zero_grad()
    F.cross_entropy(model(whole.x.double() / ROWS), whole.y).backward()
    np.testing.assert_allclose(found, model.weight.grad.numpy(), rtol=1e-12)


def test_counts_are_summed_over_ranks(world: World, path: Path) -> None:
    """Behaviour 16: the mean over tokens; rank r has r of them, so rank 0 has none."""
    batch = next(iter(make(path, world)))
    loss = torch.tensor(float(world.rank) if world.rank else float("nan"))
    weighed = batch.weigh(loss, count=world.rank).item()
    counts = np.arange(world.size)
    expected = (counts**2).sum() / max(1, counts.sum())
    assert world.mean(weighed) == pytest.approx(expected)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_disagree(world: World, path: Path) -> None:
    """Behaviour 33: an error on every rank that names both sides."""
    with pytest.raises(MismatchError, match=r"rank 1 made .*\(16, 1, .*rank 0 with .*\(16, 0, "):
        make(path, world, seed=world.rank)
    with pytest.raises(MismatchError, match="drop_last"):
        make(path, world, drop_last=world.rank == 1)


def test_the_world_of_init_is_taken(world: World, path: Path) -> None:
    """Behaviour 23: forgotten, the ranks share the samples all the same; a world alone takes all of them."""
    shared = HDF5Loader(path, ("x",), 16, streams=8)
    assert shared.world is world
    assert sorted(row for batch in shared for row in global_rows(world, batch.indices)) == list(range(ROWS))
    assert sum(batch.size for batch in HDF5Loader(path, ("x",), 16, streams=8, world=World.alone())) == ROWS


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_drop_last(world: World, path: Path, shuffle: Shuffle) -> None:
    """Behaviours 23 to 25: all ranks leave out the same step, and none is without samples."""
    loader = make(path, world, shuffle=shuffle, drop_last=True)
    complete = make(path, World.alone(), shuffle=shuffle)
    for _ in range(2):
        expected = [sorted(batch.indices.tolist()) for batch in complete][: ROWS // 16]
        assert [global_rows(world, batch.indices) for batch in loader] == expected
    next(iter(loader))
    other = make(path, world, shuffle=shuffle, global_batch=40, drop_last=True)
    other.load_state_dict(loader.state_dict())
    assert [batch.global_size for batch in other] == [40] * ((ROWS - 16) // 40)


def test_a_new_pass_in_file_order_on_all_ranks(world: World, path: Path) -> None:
    """Behaviour 26: after a pass that broke off, which no rank knows of another."""
    loader = make(path, world, shuffle="none")
    for _ in zip(range(1 + world.rank), loader, strict=False):
        pass
    assert sorted(row for batch in loader for row in global_rows(world, batch.indices)) == list(range(ROWS))


@pytest.mark.mpi(min_size=2)
def test_one_file_by_other_names(world: World, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that stand in folders of their own, or name a link, have one file; equal names of two files do not."""
    folder = path.parent
    own = folder / f"rank_{world.rank}"
    own.mkdir()
    monkeypatch.chdir(own)
    (own / "link.h5").symlink_to(path)
    (own / "hard.h5").hardlink_to(path)
    names = ["../data.h5", "link.h5", "hard.h5", path]
    for name in [*names, names[world.rank % 4]]:
        loader = make(Path(name), world)
        seen = [row for batch in loader for row in global_rows(world, batch.indices)]
        assert sorted(seen) == list(range(ROWS))
        loader.close()
    (own / "copy.h5").write_bytes(path.read_bytes())
    with pytest.raises(MismatchError, match="rank 1 made an HDF5Loader with"):
        make(Path("copy.h5"), world)


@pytest.mark.parametrize("mode", ["stream", "node", "store", "stage"])
@pytest.mark.filterwarnings("ignore:mode=.stage. copies to")
def test_changed_data_are_refused_on_all_ranks(world: World, path: Path, mode: Mode, tmp_path: Path) -> None:
    """Behaviour 53: by the same words; accepted, all begin the epoch anew."""
    folder = world.broadcast(str(tmp_path))
    loader = make(path, world, mode=mode, stage_folder=folder)
    next(iter(loader))
    state = loader.state_dict()
    loader.close()
    world.barrier()
    if world.rank == 0:
        with h5py.File(path, "r+") as file:
            file["y"][-1] = 7
    world.barrier()
    loader = make(path, world, mode=mode, stage_folder=folder)
    with pytest.raises(DataError, match='other values in field "y"') as caught:
        loader.load_state_dict(state)
    assert len(set(world.comm.allgather(str(caught.value)))) == 1
    loader.load_state_dict(state, accept_changed=True)
    seen = [row for batch in loader for row in global_rows(world, batch.indices)]
    assert sorted(seen) == list(range(ROWS))
    loader.close()
