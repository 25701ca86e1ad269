"""A loader that fails on one rank in the middle of an epoch: the same exception on all ranks, which they may catch."""

from collections.abc import Iterator

import pytest
import torch
from mpi_helpers import batch, same_bits, share, small_model

import mpidp
from mpidp.errors import DataError


def failing(world: mpidp.World, step: int, guilty: int) -> Iterator[int]:
    """Numbers, until a rank cannot have its own."""
    for number in range(6):
        if number == step and world.rank == guilty:
            raise DataError(f"rank {guilty} cannot read chunk 7")
        yield number


def train(world: mpidp.World, model: mpidp.DataParallel, numbers: Iterator[int]) -> int:
    """Trains on the batches of these numbers; returns how many there were."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps = 0
    for number in model.batches(numbers):
        x, y = (share(world, part) for part in batch(number))
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return steps


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("step", [0, 3])
def test_all_ranks_raise_the_same(world: mpidp.World, overlap: bool, step: int) -> None:
    """Behaviour 30: before the optimizer changes anything, so that training may go on."""
    model = mpidp.DataParallel(small_model(), world, reducer="flat", bucket_bytes=100, overlap=overlap)
    guilty = world.size - 1

    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(DataError, match="cannot read chunk 7") as caught:
        train(world, model, failing(world, step, guilty))
    assert f"on rank {guilty} of {world.size} ({world.host})" in "".join(caught.value.__notes__)
    if step == 0:
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    model.zero_grad()
    assert train(world, model, iter(range(4))) == 4
    assert same_bits(world, model.parameters())
    model.unwrap()


def test_two_ranks_fail_in_one_step(world: mpidp.World) -> None:
    """Behaviour 30: the lowest of them is named, once."""
    model = mpidp.DataParallel(small_model(), world, reducer="flat")
    with pytest.raises(DataError, match="rank 0 cannot read"):
        for _ in model.batches(failing(world, 0, world.rank)):
            raise AssertionError("no rank has a batch")
    model.unwrap()


def test_batches_are_those_of_the_loader(world: mpidp.World) -> None:
    model = mpidp.DataParallel(small_model(), world, reducer="flat")
    assert list(model.batches(range(5))) == list(range(5))
    assert list(model.batches([])) == []
    model.unwrap()


def test_status_says_step_and_phase(world: mpidp.World) -> None:
    """Behaviour 32: of a loop of the user's own, by itself."""
    model = mpidp.DataParallel(small_model(), world, reducer="flat")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = world.status.step
    seen = []
    model.module[2].register_forward_hook(lambda *_: seen.append(world.status.phase))
    model.module[2].weight.register_hook(lambda _: seen.append(world.status.phase))
    for number in model.batches(range(3)):
        x, y = (share(world, part) for part in batch(number))
        (model(x) - y).square().mean().backward()
        optimizer.step()
        assert world.status.phase == "between steps"
    assert seen == ["forward", "backward"] * 3
    assert world.status.step == steps + 3
    model.unwrap()


@pytest.mark.parametrize("overlap", [False, True])
def test_layers_that_wait_for_each_other(world: mpidp.World, overlap: bool) -> None:
    """Behaviours 18 and 30: nobody waits in a layer for the rank without a batch; training may go on."""
    module = mpidp.SyncBatchNorm.convert(torch.nn.Sequential(small_model(), torch.nn.BatchNorm1d(3).double()), world)
    model = mpidp.DataParallel(module, world, reducer="flat", bucket_bytes=100, overlap=overlap)
    guilty = world.size - 1

    with pytest.raises(DataError, match="cannot read chunk 7") as caught:
        train(world, model, failing(world, 3, guilty))
    assert f"on rank {guilty} of {world.size} ({world.host})" in "".join(caught.value.__notes__)
    assert train(world, model, iter(range(4))) == 4
    assert same_bits(world, model.state_dict().values())
    model.unwrap()


@pytest.mark.mpi(min_size=2)
def test_a_failure_inside_such_a_step_is_ones_own(world: mpidp.World) -> None:
    """Behaviour 18: the others may be in any layer, so it waits for nobody before it raises."""
    module = mpidp.SyncBatchNorm.convert(torch.nn.Sequential(small_model(), torch.nn.BatchNorm1d(3).double()), world)
    model = mpidp.DataParallel(module, world, reducer="flat")
    x, _ = (share(world, part) for part in batch(0))
    output = model(x)
    if world.rank == 0:
        with pytest.raises(DataError, match="no target"):
            model.fail(DataError("no target"))
    output.sum().backward()
    model.unwrap()
