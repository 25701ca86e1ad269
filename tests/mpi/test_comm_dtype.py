"""Gradients that travel in 16 bits: the mean is compared with the exact one and with the stated bound."""

import pytest
import torch
from mpi_helpers import SUMMING, Means, same_bits
from torch import Tensor

import mpidp
from mpidp.reduce.transport import ReducerOptions

# Of the largest contribution: half a unit in the last place when it is sent, as much for the mean.
BOUND = {"bf16": 2.0**-7, "fp16": 2.0**-10}
SIZES = (1, 33, 5000, 20001)


def reduce(world: mpidp.World, name: str, options: ReducerOptions, contributions: list[Tensor]) -> list[Tensor]:
    """The means of this rank's contributions by a reducer."""
    means = Means(world, name, contributions, options, bucket_bytes=1 << 16)
    results = means(contributions)
    means.reducer.close()
    return results


def of_rank(rank: int, numel: int, scale: float = 1.0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * rank + numel)) * scale


@pytest.mark.parametrize("name", SUMMING)
@pytest.mark.parametrize("comm_dtype", BOUND)
@pytest.mark.parametrize("piece_bytes", [4096, 1 << 20])
def test_error_is_within_the_stated_bound(world: mpidp.World, name: str, comm_dtype: str, piece_bytes: int) -> None:
    """Behaviour 4: float32 out, the same bits on all ranks, the error bounded."""
    means = reduce(
        world, name, ReducerOptions(piece_bytes, comm_dtype), [of_rank(world.rank, numel) for numel in SIZES]
    )
    for numel, mean in zip(SIZES, means, strict=True):
        everybody = torch.stack([of_rank(rank, numel) for rank in range(world.size)]).double()
        bound = everybody.abs().amax(0) * BOUND[comm_dtype] + 2.0**-24
        assert mean.dtype == torch.float32
        assert bool(((mean - everybody.mean(0)).abs() <= bound).all())
    assert same_bits(world, means)


@pytest.mark.parametrize("name", SUMMING)
def test_mean_does_not_overflow_where_the_sum_would(world: mpidp.World, name: str) -> None:
    """Behaviour 4: 60000 fits into float16, twice that does not."""
    (mean,) = reduce(world, name, ReducerOptions(4096, "fp16"), [torch.full((9000,), 60000.0)])
    assert mean.dtype == torch.float32
    assert bool((mean == 60000).all())


@pytest.mark.parametrize("name", SUMMING)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_only_float32_is_shortened(world: mpidp.World, name: str, dtype: torch.dtype) -> None:
    contributions = [of_rank(world.rank, numel).to(dtype) for numel in SIZES]
    full = reduce(world, name, ReducerOptions(), contributions)
    shortened = reduce(world, name, ReducerOptions(comm_dtype="bf16"), contributions)
    for expected, found in zip(full, shortened, strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("name", ["flat", "naive"])
def test_error_feedback_loses_nothing_over_many_steps(world: mpidp.World, name: str) -> None:
    """A gradient far below half a unit in the last place of a large one is lost for ever without feedback."""
    options = ReducerOptions(comm_dtype="bf16", error_feedback=True)
    small = 1 + 2.0**-11  # bfloat16 has steps of 2^-7 here
    gradient, total = torch.full((1000,), small), torch.zeros(1000)
    means = Means(world, name, [gradient], options)
    for _ in range(64):
        total += means([gradient])[0]
    torch.testing.assert_close(total, torch.full((1000,), 64 * small), rtol=0, atol=2.0**-7)
    assert abs(64 * small - 64) > 2.0**-7  # what would be lost


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_error_feedback_forgets_what_overflowed(world: mpidp.World, value: float) -> None:
    """A GradScaler makes infinite gradients by design; the steps after must be finite again."""
    means = Means(world, "flat", [torch.zeros(100)], ReducerOptions(comm_dtype="fp16", error_feedback=True))
    means([torch.full((100,), value)])
    assert bool((means([torch.ones(100)])[0] == 1).all())
