"""The same training with and without a helper thread that reduces during backward: no bit may differ."""

import pytest
import torch
from mpi_helpers import SUMMING, batch, same_bits, share, small_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mpidp


def train(world: mpidp.World, reducer: str, overlap: bool) -> list[Tensor]:
    """Some steps of a model with many buckets, some of them in two parts."""
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(6)]
    model = mpidp.DataParallel(
        nn.Sequential(*layers, nn.Linear(5, 3)).double(), world, reducer=reducer, bucket_bytes=300, overlap=overlap
    )
    assert len(model.buckets.buckets) > 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        x, y = (share(world, part) for part in batch(step))
        with model.no_sync():
            (model(x[:1]) - y[:1]).square().mean().backward()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    model.unwrap()
    return parameters


@pytest.mark.parametrize("reducer", SUMMING)
def test_overlap_changes_no_bit(world: mpidp.World, reducer: str) -> None:
    after, during = train(world, reducer, False), train(world, reducer, True)
    assert all(torch.equal(one, other) for one, other in zip(after, during, strict=True))
    assert same_bits(world, during)


def test_buckets_leave_before_backward_is_over(world: mpidp.World) -> None:
    """Otherwise nothing would overlap: the first layers' gradients come last."""
    model = mpidp.DataParallel(small_model(), world, reducer="flat", bucket_bytes=8, overlap=True)
    sent: list[int] = []
    first = next(model.module.parameters())
    handle = first.register_hook(lambda gradient: sent.append(model._sync._sent))
    x, y = (share(world, part) for part in batch(0))
    (model(x) - y).square().mean().backward()
    handle.remove()
    assert sent == [len(model.buckets.buckets) - 1 - int(sent[0] < len(model.buckets.buckets) - 1)]
    assert sent[0] >= 1
    model.unwrap()


def test_an_error_in_the_thread_is_raised_in_training_on_every_rank(world: mpidp.World) -> None:
    model = mpidp.DataParallel(small_model(), world, reducer="flat", bucket_bytes=100, overlap=True)
    pack = model.buckets.pack

    def fail_on_the_last_rank(bucket: object) -> None:
        if world.rank == world.size - 1:
            raise ArithmeticError("made to fail")
        pack(bucket)  # type: ignore[arg-type]

    model.buckets.pack = fail_on_the_last_rank  # type: ignore[method-assign]
    x, y = (share(world, part) for part in batch(0))
    with pytest.raises(ArithmeticError, match="made to fail") as caught:
        (model(x) - y).square().mean().backward()
    assert f"rank {world.size - 1}" in caught.value.__notes__[0]
    model.buckets.pack = pack  # type: ignore[method-assign]
    model.zero_grad()
    (model(x) - y).square().mean().backward()  # and training may go on
    model.unwrap()


def test_gradients_that_come_twice_are_an_error(world: mpidp.World) -> None:
    """Reentrant checkpointing of tied weights: a bucket has left when the second gradient comes."""
    layer = nn.Linear(5, 5).double()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            inner = checkpoint(self.layer, x, use_reentrant=True)
            return self.layer(inner)

    model = mpidp.DataParallel(Twice(), world, reducer="flat", bucket_bytes=8, overlap=True)
    x = batch(0)[0].requires_grad_()
    with pytest.raises(RuntimeError, match="second gradient"):
        model(x).sum().backward()


def test_two_wrappers_reduce_at_once(world: mpidp.World) -> None:
    """A generator's step goes backward through both networks: neither thread may take the other's messages."""
    results = []
    for overlap in (False, True):
        torch.manual_seed(0)
        pair = [
            mpidp.DataParallel(
                nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)).double(),
                world,
                reducer="flat",
                bucket_bytes=100,
                overlap=overlap,
            )
            for _ in range(2)
        ]
        for step in range(5):
            x, _ = (share(world, part) for part in batch(step))
            pair[1](pair[0](x)).square().mean().backward()
            assert same_bits(world, [p.grad for model in pair for p in model.parameters() if p.grad is not None])
        results.append([p.grad.clone() for model in pair for p in model.parameters() if p.grad is not None])
        for model in pair:
            model.unwrap()
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
