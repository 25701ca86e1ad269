"""Running statistics of batch norm, combined over ranks by sample counts."""

from typing import cast

import pytest
import torch
from mpi_helpers import same_bits
from torch import Tensor, nn

import mpidp
from mpidp.train.batch_norm import combine_statistics


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5), nn.BatchNorm1d(5)
    )


def statistics(module: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in module.buffers() if buffer.is_floating_point()]


def drift(world: mpidp.World, module: nn.Module, samples: int) -> None:
    """Forward passes on data of this rank's own."""
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(3):
        module(world.rank + torch.randn(samples, 2, 4, 4, generator=generator))


def test_combined_by_samples(world: mpidp.World) -> None:
    """Behaviour 17: the mean of means, and the variance of all samples seen as one group."""
    module = model()
    samples = 2 * world.rank + 3
    drift(world, module, samples)
    everyones = world.comm.allgather((samples, [buffer.double() for buffer in statistics(module)]))
    combine_statistics(module, world, samples)
    weights = torch.tensor([float(count) for count, _ in everyones], dtype=torch.float64)
    weights /= weights.sum()
    found = statistics(module)
    for layer in range(0, len(found), 2):
        means = torch.stack([buffers[layer] for _, buffers in everyones])
        variances = torch.stack([buffers[layer + 1] for _, buffers in everyones])
        mean = (weights[:, None] * means).sum(0)
        variance = (weights[:, None] * (variances + (means - mean).square())).sum(0)
        torch.testing.assert_close(found[layer].double(), mean, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(found[layer + 1].double(), variance, rtol=1e-6, atol=1e-7)
    assert same_bits(world, module.buffers())
    assert int(module.get_buffer("1.num_batches_tracked")) == 3


def test_close_to_the_statistics_of_one_big_batch(world: mpidp.World) -> None:
    """Behaviour 17: with momentum 1 the running values are those of the batch; only n - 1 against n remains."""
    norm = nn.BatchNorm1d(3, momentum=1.0)
    rows = 50 + 25 * world.rank
    torch.manual_seed(world.rank)
    mine = torch.randn(rows, 3) * (1 + world.rank) + world.rank
    norm(mine)
    combine_statistics(norm, world, rows)
    everything = torch.cat(world.comm.allgather(mine))
    torch.testing.assert_close(norm.running_mean, everything.mean(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm.running_var, everything.var(0), rtol=0.03, atol=0)


def test_a_rank_without_samples_counts_for_nothing(world: mpidp.World) -> None:
    """Behaviours 16 and 17: even if its statistics are not a number; it gets the others' values."""
    module = model()
    first = world.rank == 0 and world.size > 1
    drift(world, module, 0 if first else 4)
    if first:
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.fill_(float("nan"))
    combine_statistics(module, world, 0 if first else 4)
    assert all(bool(buffer.isfinite().all()) for buffer in statistics(module))
    assert same_bits(world, statistics(module))


def test_no_samples_anywhere_changes_nothing(world: mpidp.World) -> None:
    """Behaviour 17: combining twice in a row, before evaluation and again before saving."""
    module = model()
    drift(world, module, 4)
    combine_statistics(module, world, 4)
    before = statistics(module)
    combine_statistics(module, world, 0)
    assert all(torch.equal(*pair) for pair in zip(before, statistics(module), strict=True))


@pytest.mark.parametrize(
    "module",
    [nn.Linear(2, 2), nn.BatchNorm1d(3, track_running_stats=False), nn.InstanceNorm1d(3)],
    ids=["none", "no running statistics", "instance norm"],
)
def test_nothing_to_combine_communicates_nothing(world: mpidp.World, module: nn.Module) -> None:
    """Behaviour 17: modules without running statistics."""
    silent = type("Silent", (), {"size": world.size})()  # any other use of it fails
    combine_statistics(module, cast(mpidp.World, silent), 3)


def test_forward_communicates_nothing(world: mpidp.World) -> None:
    """Behaviour 17: a rank may evaluate alone, and buffers stay each rank's own until they are combined."""
    wrapped = mpidp.DataParallel(model(), world)
    if world.rank == 0:
        wrapped(torch.randn(4, 2, 4, 4))
    moved = world.comm.allgather(bool(wrapped.module[1].running_mean.any()))
    assert moved == [rank == 0 for rank in range(world.size)]
    combine_statistics(wrapped, world, 4 if world.rank == 0 else 0)
    assert same_bits(world, statistics(wrapped))
