"""`world.gather_rows` and `world.weigh`: what ranks hold for their samples, as one process would have it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mpidp
from mpidp.errors import DataError

pytestmark = pytest.mark.sizes

ROWS = 37


def share_of(world: mpidp.World, rows: np.ndarray) -> np.ndarray:
    """Uneven shares, in no order; the last rank of several has none."""
    edges = np.linspace(0, len(rows), max(world.size, 2)).astype(int) ** 2 // max(1, len(rows))
    edges = np.append(edges, len(rows)) if world.size > 1 else np.array([0, len(rows)])
    return np.random.default_rng(3).permutation(rows)[edges[world.rank] : edges[world.rank + 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 5)])
def test_rows_come_in_the_order_of_the_data(world: mpidp.World, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Behaviour 26: uneven shares, one of them empty and of no known shape; every rank has all."""
    whole = (torch.arange(ROWS * 10).reshape(ROWS, 10)[:, : int(np.prod(shape))] % 7).reshape(ROWS, *shape).to(dtype)
    rows = share_of(world, np.arange(ROWS))
    values = whole[torch.from_numpy(rows)] if len(rows) else torch.empty(0)
    gathered = world.gather_rows(values.requires_grad_(values.is_floating_point()), rows, ROWS)
    assert gathered.dtype == dtype and not gathered.requires_grad
    assert torch.equal(gathered, whole)


def test_a_part_of_the_rows(world: mpidp.World) -> None:
    """As of a loader with a split: in ascending order, not at the places of their numbers."""
    rows = share_of(world, np.arange(5, ROWS, 3))
    gathered = world.gather_rows(torch.from_numpy(rows * 2), torch.from_numpy(rows))
    assert gathered.tolist() == [2 * row for row in range(5, ROWS, 3)]
    with pytest.raises(DataError, match="was given 11 rows, and 12 were expected; give the rows of all"):
        world.gather_rows(torch.from_numpy(rows), rows, 12)


def test_every_wrong_use_is_an_error_on_all_ranks(world: mpidp.World) -> None:
    rows = share_of(world, np.arange(ROWS))
    values = torch.from_numpy(rows)
    last = world.size - 1
    assert world.gather_rows(torch.empty(0, 4), [], 0).shape == (0, 4)
    with pytest.raises(DataError, match="was given 0 rows, and 2 were expected: rows 0, 1 did not come"):
        world.gather_rows(torch.empty(0, 4), [], 2)
    with pytest.raises(DataError, match="rows 8, 30 did not come"):
        kept = rows[~np.isin(rows, (8, 30))]
        world.gather_rows(torch.from_numpy(kept), kept, ROWS)
    with pytest.raises(DataError, match="was given row 4 more than once"):
        again = np.append(rows, 4) if world.rank == last else rows
        world.gather_rows(torch.from_numpy(again), again)
    with pytest.raises(DataError, match=r"values of shape \(3, 2\) and 2 row numbers"):
        world.gather_rows(torch.zeros(3, 2), [0, 1]) if world.rank == last else world.gather_rows(values, rows)
    if world.size > 1:
        with pytest.raises(DataError, match=r"of torch\.int64 and shape .* on rank 0, of torch\.float32"):
            world.gather_rows(torch.zeros(1, dtype=[torch.int64, torch.float32][world.rank > 0]), [world.rank])
    assert world.all(True)  # all are here


def test_predictions_of_a_whole_evaluation(world: mpidp.World, mpi_tmp_path: Path) -> None:
    """Behaviour 26: a metric over gathered predictions is that of one process; several batches at once."""
    import h5py

    if world.rank == 0:
        with h5py.File(mpi_tmp_path / "a.h5", "w") as file:
            file["x"] = np.arange(ROWS * 2, dtype="f4").reshape(ROWS, 2)
    world.barrier()
    loader = mpidp.HDF5Loader(mpi_tmp_path / "a.h5", ("x",), 8, shuffle="full")
    outputs, rows = [], []
    for batch in loader:
        (x,) = batch
        outputs.append(x.sum(1))
        rows.append(batch.indices)
    gathered = world.gather_rows(torch.cat(outputs), np.concatenate(rows), len(loader.dataset))
    assert gathered.tolist() == [4 * row + 1 for row in range(ROWS)]
    loader.close()
    world.barrier()


def test_weighed_losses_give_the_gradient_of_the_whole(world: mpidp.World) -> None:
    """Behaviour 16: rank r has 2 r samples, so rank 0 has none, and gives no gradient at all."""
    torch.manual_seed(0)
    alone = nn.Linear(3, 1).double()
    model = mpidp.DataParallel(nn.Linear(3, 1).double(), world, quiet=True)
    model.module.load_state_dict(alone.state_dict())
    counts = [2 * rank for rank in range(world.size)] if world.size > 1 else [5]
    x = torch.randn(sum(counts), 3, dtype=torch.float64)
    alone(x).square().mean().backward()
    own = x.split(counts)[world.rank]
    loss: Tensor = world.weigh(model(own).square().mean(), len(own))
    loss.backward()
    torch.testing.assert_close(model.module.weight.grad, alone.weight.grad)
    assert world.mean(loss.item()) == pytest.approx(alone(x).square().mean().item())
    model.unwrap()


def test_weigh_refuses_what_is_no_mean_and_gives_no_gradient_of_nothing(world: mpidp.World) -> None:
    loss = torch.tensor(float("nan"), requires_grad=True)
    weighed = world.weigh(loss, 0)
    weighed.backward()
    assert weighed.item() == 0 and loss.grad is None
    with pytest.raises(DataError, match=r"a loss of shape \(2,\)"):
        world.weigh(torch.zeros(2), 2)
    with pytest.raises(DataError, match="a count of -1"):
        world.weigh(torch.zeros(()), -1)
