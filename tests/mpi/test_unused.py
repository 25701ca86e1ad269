"""Parameters that some ranks use and others do not, and none at all."""

import pytest
import torch
from mpi_helpers import CountedMean, batch, same_bits, share
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name every PyTorch program gives it

import mpidp


class Experts(nn.Module):
    """One layer a rank, one more that nobody uses, and one that all share."""

    def __init__(self, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.never = nn.Linear(5, 3).double(), nn.Linear(5, 3).double()
        self.experts = nn.ModuleList(nn.Linear(5, 3).double() for _ in range(size))

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        return self.shared(x) + self.experts[chosen](x)


def backward(world: mpidp.World, model: mpidp.DataParallel, chosen: int, seed: int = 0) -> Tensor:
    x, y = (share(world, part) for part in batch(seed))
    loss = F.mse_loss(model(x, chosen), y)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@pytest.mark.parametrize("reducer", ["naive", "flat", "staged", "node"])
def test_used_on_one_rank_only(world: mpidp.World, reducer: str, bucket_bytes: int, overlap: bool) -> None:
    """Behaviour 14: the others contribute zero."""
    module = Experts(world.size)
    model = mpidp.DataParallel(module, world, reducer=reducer, bucket_bytes=bucket_bytes, overlap=overlap)
    plain = Experts(world.size)
    x, y = batch(0)
    parts = [F.mse_loss(plain(x[rank :: world.size], rank), y[rank :: world.size]) for rank in range(world.size)]
    torch.stack(parts).mean().backward()  # type: ignore[no-untyped-call]
    for _ in range(2):
        model.zero_grad()
        backward(world, model, world.rank)
        for (name, expected), found in zip(plain.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad, msg=lambda text, name=name: f"{name}: {text}")
    assert model.module.never.weight.grad is None


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_control_flow_that_differs_between_ranks_and_steps(
    world: mpidp.World, set_to_none: bool, overlap: bool
) -> None:
    """Behaviours 8 and 14: AdamW decays what has a gradient, so a None on one rank only would tell."""
    model = mpidp.DataParallel(Experts(2 * world.size), world, bucket_bytes=200, overlap=overlap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    start = model.module.never.weight.clone()
    for step in range(6):
        optimizer.zero_grad(set_to_none=set_to_none)
        with model.no_sync():
            backward(world, model, (world.rank + step) % (2 * world.size), step)
        backward(world, model, (3 * world.rank + step) % (2 * world.size), step)
        present = [parameter.grad is not None for parameter in model.parameters()]
        assert world.broadcast(present) == present
        optimizer.step()
        assert same_bits(world, model.parameters())
    assert model.module.never.weight.grad is None
    assert torch.equal(model.module.never.weight, start)


@pytest.mark.parametrize("overlap", [False, True])
def test_all_gradients_unused_on_some_ranks(world: mpidp.World, overlap: bool) -> None:
    """Behaviour 14: the last rank's loss goes round every parameter of the model, but through the model."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.lone = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x: Tensor, closed: bool) -> Tensor:
            return self.lone * 0 + x.sum() if closed else (x[:, :3] * self.scale).sum()

    model = mpidp.DataParallel(Gate(), world, bucket_bytes=1, overlap=overlap)
    x = torch.ones(2, 5, dtype=torch.float64)
    closed = world.rank == world.size - 1
    model(x, closed).backward()
    assert model.module.lone.grad is not None and model.module.lone.grad == 0
    if world.size == 1:
        assert model.module.scale.grad is None
    else:
        expected = torch.full((3,), 2 * (world.size - 1) / world.size, dtype=torch.float64)
        torch.testing.assert_close(model.module.scale.grad, expected)


def test_a_gradient_asked_for_by_torch_autograd_is_not_reduced(world: mpidp.World) -> None:
    """Behaviour 14: nor is it where the output goes past all of the module's parameters, which alone takes no part."""

    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return x

    first = nn.Linear(5, 5)
    model = mpidp.DataParallel(Skip(), world, reducer="flat")
    counted = CountedMean(model)
    torch.autograd.grad(model(first(torch.ones(2, 5))).sum(), [first.weight])
    assert counted.calls == 0
    model(first(torch.ones(2, 5))).sum().backward()
    assert counted.calls == len(model.buckets.buckets)
    model.requires_grad_(False)
    model(first(torch.ones(2, 5))).sum().backward()
    assert counted.calls == len(model.buckets.buckets)
