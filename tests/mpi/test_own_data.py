"""The loops of docs/howto/own_data.md train and measure as one process does on the whole batches."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import mpidp

PAGE = Path(__file__).resolve().parents[2] / "docs/howto/own_data.md"
LR = 0.5
N = 130  # the last step of an epoch has 2 samples: less than one a rank from 3 ranks on


def block(number: int) -> str:
    """A block of code of the page."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[number]


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, 8, generator=generator), torch.randint(10, (N,), generator=generator)


@pytest.fixture
def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(8, 10)


@pytest.fixture
def scope(world: mpidp.World, plain: nn.Module) -> Iterator[dict[str, Any]]:
    """What the blocks of the page refer to."""
    model = mpidp.DataParallel(copy.deepcopy(plain), world, reducer="flat")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    names = {"mpidp": mpidp, "torch": torch, "np": np, "F": F, "DataLoader": DataLoader, "world": world}
    yield {**names, "model": model, "optimizer": optimizer}
    model.unwrap()


def train(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    """Plain torch, on whole batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for x, y in batches:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    for (name, tensor), other in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(tensor, other, msg=name)


def test_a_dataset(scope: dict[str, Any], data: tuple[Tensor, Tensor], plain: nn.Module) -> None:
    """Behaviours 7, 16 and 23: the steps of one process, whatever the number of ranks; some have nothing at the end."""
    dataset = TensorDataset(*data)
    exec(block(0), {**scope, "dataset": dataset})
    shares = mpidp.shares(N, 64, 0, world=mpidp.World.alone())
    whole = DataLoader(dataset, batch_sampler=shares)
    train(plain, [batch for _ in range(2) for _, batch in shares.steps(whole)])  # type: ignore[misc]
    assert_same(scope["model"], plain)


def test_a_resume_of_shares_at_another_size(world: mpidp.World) -> None:
    """Behaviour 25: saved by one process, with another global batch."""
    alone = mpidp.shares(N, 25, 4, world=mpidp.World.alone())
    numbers = TensorDataset(torch.arange(N))
    loader = DataLoader(numbers, batch_sampler=alone, num_workers=1)
    seen = [index for _, (share, _) in zip(range(2), alone.steps(loader), strict=False) for index in share.indices]
    shares = mpidp.shares(N, 16, 4)
    shares.load_state_dict({**alone.state_dict(), "position": 50})
    for share, _ in shares.steps(DataLoader(numbers, batch_sampler=shares)):
        assert sum(world.comm.allgather(share.size)) == share.global_size
        seen += [index for part in world.comm.allgather(share.indices) for index in part]
    assert sorted(seen) == list(range(N))


def test_streams_that_end_at_different_times(
    world: mpidp.World, scope: dict[str, Any], data: tuple[Tensor, Tensor], plain: nn.Module
) -> None:
    """Behaviour 16: rank r has 2 r + 1 batches of r + 1 samples, but rank 0 of several has none at all."""
    ends = [0, *np.cumsum([(2 * rank + 1) * (rank + 1) for rank in range(4)])]
    parts = [[tensor[ends[rank] : ends[rank + 1]].split(rank + 1) for tensor in data] for rank in range(world.size)]
    if world.size > 1:
        parts[0] = [(), ()]
    streams = [list(zip(*part, strict=True)) for part in parts]
    exec(block(1), {**scope, "stream": iter(streams[world.rank])})
    steps = [[stream[step] for stream in streams if step < len(stream)] for step in range(max(map(len, streams)))]
    train(plain, [(torch.cat(xs), torch.cat(ys)) for xs, ys in (zip(*step, strict=True) for step in steps)])
    assert len(steps) == 2 * world.size - 1
    assert_same(scope["model"], plain)


def test_predictions_and_metrics(
    world: mpidp.World, scope: dict[str, Any], data: tuple[Tensor, Tensor], plain: nn.Module, mpi_tmp_path: Path
) -> None:
    """Behaviour 26: predictions of all rows in their order; sums over ranks; the bridge gets all ranks' states."""
    x, y = data
    if world.rank == 0:
        with h5py.File(mpi_tmp_path / "a.h5", "w") as file:
            file["x"], file["y"] = x.numpy(), y.numpy()
    world.barrier()
    evaluation = mpidp.HDF5Loader(mpi_tmp_path / "a.h5", ("x", "y"), 24, shuffle="none")
    names = {**scope, "evaluation": evaluation}
    exec(block(2), names)
    predictions = plain(x).argmax(1)
    assert torch.equal(names["predictions"], predictions)
    own = [(scope["model"](xs).argmax(1) == ys).sum().item() for xs, ys in evaluation]
    names |= {"right": sum(own), "count": sum(batch.size for batch in evaluation)}
    exec(block(4), names)
    assert names["count"] == N and names["accuracy"] == (predictions == y).double().mean().item()
    names["torchmetrics"] = _Torchmetrics()
    exec(block(3), names)
    gathered = names["metric"]["dist_sync_fn"](torch.full((2,), world.rank), group=None)
    assert [tensor.tolist() for tensor in gathered] == [[rank, rank] for rank in range(world.size)]
    assert names["metric"]["distributed_available_fn"]()
    evaluation.close()
    world.barrier()


class _Torchmetrics:
    """Stands for the package: keeps the arguments that a metric is made with, which are all that mpidp has to do."""

    def __getattr__(self, name: str) -> Any:
        return self

    def MulticlassAccuracy(self, **arguments: Any) -> dict[str, Any]:  # noqa: N802  # torchmetrics' name
        return arguments
