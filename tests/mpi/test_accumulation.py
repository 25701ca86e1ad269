"""Several backward passes before a step: `no_sync`, zero_grad, and accumulations that are cut short or given up."""

import contextlib

import pytest
import torch
from mpi_helpers import CountedMean, batch, gradients, same_bits, share, small_model
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name every PyTorch program gives it

import mpidp

pytestmark = pytest.mark.sizes

MICRO_BATCHES = 3
BUCKETS = 4


def loss_of(model: nn.Module, world: mpidp.World | None, seed: int) -> Tensor:
    x, y = batch(seed) if world is None else (share(world, part) for part in batch(seed))
    return F.mse_loss(model(x), y) / MICRO_BATCHES


def expected_gradients(seeds: range = range(MICRO_BATCHES)) -> dict[str, Tensor | None]:
    """Of one process on all micro-batches at once."""
    plain = small_model()
    torch.stack([loss_of(plain, None, seed) for seed in seeds]).sum().backward()  # type: ignore[no-untyped-call]
    return gradients(plain)


def assert_gradients(model: nn.Module, expected: dict[str, Tensor | None]) -> None:
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-14)


@pytest.fixture(params=[False, True], ids=["after", "overlap"])
def model(world: mpidp.World, request: pytest.FixtureRequest) -> mpidp.DataParallel:
    """Four parameters, a bucket each, reduced after backward or while it runs."""
    model = mpidp.DataParallel(small_model(), world, reducer="flat", bucket_bytes=100, overlap=request.param)
    assert len(model.buckets.buckets) == BUCKETS
    return model


@pytest.mark.parametrize("around", ["nothing", "forward", "backward", "both"])
def test_accumulation_equals_one_big_batch(world: mpidp.World, model: mpidp.DataParallel, around: str) -> None:
    """Behaviour 13: wherever no_sync() stands; only where `backward` runs decides whether it reduces."""
    counted = CountedMean(model)
    for seed in range(MICRO_BATCHES):
        last = seed == MICRO_BATCHES - 1
        with model.no_sync() if around in ("forward", "both") and not last else contextlib.nullcontext():
            loss = loss_of(model, world, seed)
        with model.no_sync() if around in ("backward", "both") and not last else contextlib.nullcontext():
            loss.backward()  # type: ignore[no-untyped-call]
    assert_gradients(model, expected_gradients())
    assert counted.calls == BUCKETS * (1 if around in ("backward", "both") else MICRO_BATCHES)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_both_ways(world: mpidp.World, model: mpidp.DataParallel, set_to_none: bool) -> None:
    """Behaviour 12: right on every step, one reduction a step (11), and no copy."""
    counted = CountedMean(model)
    homes = set()
    for step in range(4):
        model.zero_grad(set_to_none=set_to_none)
        loss_of(model, world, step).backward()  # type: ignore[no-untyped-call]
        assert_gradients(model, expected_gradients(range(step, step + 1)))
        homes.add(tuple(p.grad.data_ptr() for p in model.parameters() if p.grad is not None))
    assert counted.calls == 4 * BUCKETS
    assert model.buckets.copies == 0
    assert len(homes) == 1 and len(next(iter(homes))) == 4


def test_gradients_not_zeroed_go_on_accumulating(world: mpidp.World, model: mpidp.DataParallel) -> None:
    """Behaviour 13: reduced after every backward, p.grad is still the sum of means."""
    for seed in range(MICRO_BATCHES):
        loss_of(model, world, seed).backward()  # type: ignore[no-untyped-call]
        assert_gradients(model, expected_gradients(range(seed + 1)))


def test_incomplete_accumulation_is_reduced_by_the_step(world: mpidp.World, model: mpidp.DataParallel) -> None:
    """Behaviour 13: at the end of an epoch, without disturbing the next."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = small_model()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for seeds in (range(2), range(2, 5)):
        with model.no_sync():
            for seed in seeds:
                loss_of(model, world, seed).backward()  # type: ignore[no-untyped-call]
        for seed in seeds:
            loss_of(plain, None, seed).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        plain_optimizer.step()
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    loss_of(model, world, 7).backward()  # type: ignore[no-untyped-call]
    loss_of(plain, None, 7).backward()  # type: ignore[no-untyped-call]
    assert_gradients(model, gradients(plain))
    assert same_bits(world, model.parameters())


def test_step_of_another_optimizer_reduces_nothing(world: mpidp.World, model: mpidp.DataParallel) -> None:
    """Behaviour 15: a rank may even step an optimizer of something else alone."""
    other = nn.Parameter(torch.zeros(2))
    other.grad = torch.ones(2)
    with model.no_sync():
        loss_of(model, world, 0).backward()  # type: ignore[no-untyped-call]
    if world.rank == 0:
        torch.optim.SGD([other], lr=0.1).step()
    model.synchronize()
    assert_gradients(model, expected_gradients(range(1)))


def test_synchronize_reduces_once(world: mpidp.World, model: mpidp.DataParallel) -> None:
    """Behaviour 13: whoever clips in between calls it; a second call and the step find nothing to do."""
    counted = CountedMean(model)
    with model.no_sync():
        loss_of(model, world, 0).backward()  # type: ignore[no-untyped-call]
    model.synchronize()
    assert_gradients(model, expected_gradients(range(1)))
    model.synchronize()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    assert counted.calls == BUCKETS


def test_no_sync_nests_and_survives_an_exception(world: mpidp.World, model: mpidp.DataParallel) -> None:
    counted = CountedMean(model)
    with pytest.raises(ZeroDivisionError), model.no_sync():
        with model.no_sync():
            pass
        loss_of(model, world, 0).backward()  # type: ignore[no-untyped-call]
        assert counted.calls == 0
        _ = 1 / 0
    loss_of(model, world, 1).backward()  # type: ignore[no-untyped-call]
    assert counted.calls == BUCKETS
    assert_gradients(model, expected_gradients(range(2)))


def test_backward_after_one_that_failed(world: mpidp.World, model: mpidp.DataParallel) -> None:
    """Behaviour 11: out of memory in backward on all ranks, caught, and tried again without a new forward."""

    def fail(gradient: Tensor) -> None:
        raise MemoryError("not now")

    x, y = (share(world, part) for part in batch(0))
    hidden = model.module[0](x)
    loss = F.mse_loss(model.module[2](model.module[1](hidden)), y) / MICRO_BATCHES
    handle = hidden.register_hook(fail)
    with pytest.raises(MemoryError):
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    handle.remove()
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    assert_gradients(model, expected_gradients(range(1)))


class Branching(nn.Module):
    """Uses its second layer only when told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes = nn.Linear(5, 3).double(), nn.Linear(5, 3).double()

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        return self.always(x) + (self.sometimes(x) if branch else 0)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_accumulation_given_up_leaves_no_trace(world: mpidp.World, overlap: bool) -> None:
    """Behaviours 13 and 14: a batch that is dropped by zero_grad() counts for nothing, on no rank."""
    model = mpidp.DataParallel(Branching(), world, bucket_bytes=100, overlap=overlap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (share(world, part) for part in batch(0))
    with model.no_sync():
        F.mse_loss(model(x, True), y).backward()  # type: ignore[no-untyped-call]
    optimizer.zero_grad()
    last = world.rank == world.size - 1
    F.mse_loss(model(x, last), y).backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.step()
    assert same_bits(world, model.parameters())
