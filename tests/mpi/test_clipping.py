"""Between `backward()` and `step()`: clipping, GradScaler and schedulers work as on one GPU."""

import pytest
import torch
from mpi_helpers import batch, same_bits, share, small_model
from torch.nn import functional as F  # noqa: N812  # the name every PyTorch program gives it

import mpidp


def test_clip_grad_norm(world: mpidp.World) -> None:
    """Behaviour 11: the norm is that of the mean, on every rank the same."""
    plain, model = small_model(), mpidp.DataParallel(small_model(), world)
    x, y = batch(0)
    (100 * F.mse_loss(plain(x), y)).backward()  # type: ignore[no-untyped-call]
    (100 * F.mse_loss(model(share(world, x)), share(world, y))).backward()  # type: ignore[no-untyped-call]
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert expected > 1
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-12, atol=1e-15)
    assert same_bits(world, [norm, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)])


@pytest.mark.parametrize("reducer", ["auto", "naive", "staged"])
def test_overflow_on_one_rank_skips_the_step_on_all(world: mpidp.World, reducer: str) -> None:
    """Behaviour 11: all ranks skip, lower their scale alike, and train on."""
    model = mpidp.DataParallel(small_model(dtype=torch.float32), world, reducer=reducer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    x, y = (share(world, part) for part in batch(0, dtype=torch.float32))
    scales = []
    for step in range(4):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        if step == 1 and world.rank == world.size - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        unchanged = all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
        assert unchanged == (step == 1)
    assert scales == [1024, 512, 512, 512]
    assert same_bits(world, model.parameters())
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_scaled_gradients_are_the_mean(world: mpidp.World) -> None:
    """Behaviour 11: unscale_ gives what one GPU has, under autocast, too."""
    plain, model = small_model(dtype=torch.float32), mpidp.DataParallel(small_model(dtype=torch.float32), world)
    x, y = batch(0, dtype=torch.float32)
    for each, inputs, target in ((plain, x, y), (model, share(world, x), share(world, y))):
        scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        with torch.autocast("cpu", torch.bfloat16):
            output = each(inputs)
        scaler.scale(F.mse_loss(output.float(), target)).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=0.03, atol=0.003)  # bfloat16 has 8 bits


def test_scheduler(world: mpidp.World) -> None:
    """Behaviour 11."""
    plain, model = small_model(), mpidp.DataParallel(small_model(), world)
    x, y = batch(0)
    for each, inputs, target in ((plain, x, y), (model, share(world, x), share(world, y))):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=6)
        for _ in range(5):
            optimizer.zero_grad()
            F.mse_loss(each(inputs), target).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
