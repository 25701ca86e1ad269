"""Gradients that are infinite or NaN on one rank: named before they are summed, on every rank."""

import pytest
import torch
from mpi_helpers import batch, share, small_model

import mpidp


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_parameter_and_rank_are_named(world: mpidp.World, overlap: bool, value: float) -> None:
    """Behaviour 34; afterwards training may go on."""
    model = mpidp.DataParallel(
        small_model(), world, reducer="flat", bucket_bytes=100, overlap=overlap, check_finite=True
    )
    guilty = world.size - 1
    x, y = (share(world, part) for part in batch(0))
    handle = model.module.get_parameter("2.weight").register_hook(
        lambda gradient: gradient.index_fill(0, torch.tensor([1]), value) if world.rank == guilty else gradient
    )
    with pytest.raises(FloatingPointError, match=rf"gradient of 2\.weight .* 7 of 21 elements on rank {guilty}"):
        (model(x) - y).square().mean().backward()
    handle.remove()
    model.zero_grad()
    (model(x) - y).square().mean().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    model.unwrap()


def test_large_finite_gradients_are_no_error(world: mpidp.World) -> None:
    """Their sum overflows, they themselves do not."""
    layer = torch.nn.Linear(4, 4, bias=False)
    model = mpidp.DataParallel(layer, world, reducer="flat", check_finite=True)
    model(torch.full((1, 4), 3e37)).sum().backward()
    assert layer.weight.grad is not None
    assert bool(layer.weight.grad.isfinite().all())
    model.unwrap()
