"""Every reducer against arithmetic and against `naive`."""

from collections.abc import Callable

import pytest
import torch
from mpi_helpers import SUMMING, Means, same_bits
from torch import Tensor

import mpidp
from mpidp.reduce.transport import ReducerOptions

pytestmark = pytest.mark.sizes

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]
SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 5), (0,), (1025,)]

Make = Callable[[int, int], Tensor]  # (step, parameter) -> this rank's gradient

each_reducer = pytest.mark.parametrize("name", SUMMING)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def reduce_steps(
    world: mpidp.World,
    name: str,
    dtype: torch.dtype,
    make: Make,
    steps: int = 1,
    bucket_bytes: int = 2000,
    piece_bytes: int = 1 << 20,
) -> list[list[Tensor]]:
    """The gradients after each of some steps under one reducer."""
    like = [torch.zeros(shape, dtype=dtype) for shape in SHAPES]
    means = Means(world, name, like, ReducerOptions(piece_bytes=piece_bytes), bucket_bytes)
    results = [
        means([make(step, index).to(dtype).expand_as(each) for index, each in enumerate(like)]) for step in range(steps)
    ]
    assert means.buckets.copies == 0
    means.reducer.close()
    return results


def random_gradient(rank: int, step: int, index: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 100 * step + index)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(SHAPES[index], dtype=wide, generator=generator).to(dtype)


@each_reducer
@each_dtype
def test_rank_plus_k(world: mpidp.World, name: str, dtype: torch.dtype) -> None:
    """Behaviour 1: the mean of `rank + k` is (size - 1)/2 + k, exactly, on the first step and on the next ones."""
    steps = reduce_steps(world, name, dtype, lambda step, index: torch.tensor(world.rank + index + 10 * step), 3)
    for step, means in enumerate(steps):
        assert [mean.shape for mean in means] == SHAPES
        for index, mean in enumerate(means):
            assert mean.dtype == dtype
            assert torch.equal(mean, torch.full_like(mean, (world.size - 1) / 2 + index + 10 * step))


@each_reducer
@each_dtype
def test_random_gradients_against_arithmetic(world: mpidp.World, name: str, dtype: torch.dtype) -> None:
    """Behaviours 1 and 4: within rounding of the exact mean; 16-bit sums are rounded once, not once a rank."""
    means = reduce_steps(world, name, dtype, lambda step, index: random_gradient(world.rank, step, index, dtype), 2)
    sixteen_bits = torch.finfo(dtype).bits == 16 and not dtype.is_complex
    roundings = 0.51 if sixteen_bits else world.size
    wide = torch.complex128 if dtype.is_complex else torch.float64
    for step, index in [(step, index) for step in range(2) for index in range(len(SHAPES))]:
        everyones = [random_gradient(rank, step, index, dtype).to(wide) for rank in range(world.size)]
        exact = torch.stack(everyones).mean(0)
        largest = exact.abs() if sixteen_bits else torch.stack(everyones).abs().amax(0)
        error = (means[step][index].to(wide) - exact).abs()
        assert bool((error <= roundings * torch.finfo(dtype).eps * largest + torch.finfo(dtype).tiny).all())


@each_reducer
@pytest.mark.parametrize(
    "dtype, bucket_bytes, piece_bytes",
    [
        *((dtype, 1 << 20, piece_bytes) for dtype in DTYPES for piece_bytes in (1 << 20, 1001)),
        (torch.float32, 1, 1 << 20),
    ],
    ids=str,
)
def test_equals_naive(world: mpidp.World, name: str, dtype: torch.dtype, bucket_bytes: int, piece_bytes: int) -> None:
    """Behaviours 2 and 8: however parameters are dealt into buckets; and all ranks hold the same bits.

    Behaviour 5 on a small scale: pieces of 1001 bytes stand for those of 2^30, and 1025 elements for 2^31.
    """

    def make(step: int, index: int) -> Tensor:
        return random_gradient(world.rank, step, index, dtype)

    (specified,) = reduce_steps(world, "naive", dtype, make)
    (found,) = reduce_steps(world, name, dtype, make, 1, bucket_bytes, piece_bytes)
    eps = torch.finfo(dtype).eps
    for expected, mean in zip(specified, found, strict=True):
        torch.testing.assert_close(mean, expected, rtol=2 * eps, atol=world.size * eps)
    assert same_bits(world, found)


@each_reducer
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_mean_does_not_overflow_where_the_sum_would(world: mpidp.World, name: str, dtype: torch.dtype) -> None:
    """Behaviour 4."""
    largest = torch.finfo(dtype).max
    if dtype == torch.bfloat16:
        largest /= 4  # its sum overflows float32, too: the accumulator has the same exponent
    (means,) = reduce_steps(world, name, dtype, lambda step, index: torch.tensor(largest))
    assert all(torch.equal(mean, torch.full_like(mean, largest)) for mean in means)


@each_reducer
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_not_finite_on_one_rank_reaches_all(world: mpidp.World, name: str, value: float) -> None:
    """Behaviour 11: what a GradScaler looks for must not get lost on the way, nor spread to other gradients."""
    bad = world.rank == world.size - 1
    (means,) = reduce_steps(
        world, name, torch.float32, lambda step, index: torch.tensor(value if bad and index == 2 else 1.0)
    )
    for index, mean in enumerate(means):
        expected = torch.full_like(mean, value if index == 2 else 1.0)
        torch.testing.assert_close(mean, expected, equal_nan=True, rtol=0, atol=0)


@each_reducer
def test_strange_gradients_are_taken_in(world: mpidp.World, name: str) -> None:
    """Behaviour 3: expanded, transposed and channels_last gradients that somebody assigned."""
    like = [torch.zeros(shape) for shape in [(3, 5), (4, 6), (2, 3, 4, 4)]]
    means = Means(world, name, [*like, like[2].to(memory_format=torch.channels_last)], bucket_bytes=1 << 20)
    parameters = means.buckets.parameters
    images = torch.arange(96.0).view(2, 3, 4, 4)
    local = [
        torch.tensor(1.0).expand(3, 5),
        torch.arange(24.0).view(6, 4).t(),
        images.to(memory_format=torch.channels_last),
        images,
    ]
    for parameter, gradient in zip(parameters, local, strict=True):
        parameter.grad = gradient * (world.rank + 1) if gradient.stride() != (0, 0) else gradient
    means.reduce()
    for parameter, gradient in zip(parameters, local, strict=True):
        factor = 1 if gradient.stride() == (0, 0) else (world.size + 1) / 2
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient * factor)
        assert parameter.grad.stride() == parameter.stride()


def test_null_does_nothing(world: mpidp.World) -> None:
    """Behaviour 10: packed and unpacked, but not sent; not even collective."""
    (means,) = reduce_steps(world, "null", torch.float32, lambda step, index: torch.tensor(world.rank + index))
    assert [mean.unique().tolist() for mean in means if mean.numel()] == [
        [world.rank + index] for index, shape in enumerate(SHAPES) if shape != (0,)
    ]
    if world.rank == 0:
        reduce_steps(world, "null", torch.float32, lambda step, index: torch.tensor(1.0))
