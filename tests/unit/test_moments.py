"""Count, mean and squared deviations of parts, combined to those of all values."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpidp.train.sync_group import Moments, mean_of_sums, moments_of


def combined(parts: list[Moments]) -> Moments:
    """As ranks do it, with sums over a list for those over ranks."""
    count, mean = mean_of_sums(torch.stack([part.sums() for part in parts]).sum(0))
    return Moments(count, mean, torch.stack([part.deviations_from(mean) for part in parts]).sum(0))


@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    offset=st.sampled_from([0.0, -3.0, 1e4, 1e9]),
    scale=st.floats(1e-3, 1e3),
    seed=st.integers(0, 99),
)
def test_parts_give_what_the_whole_gives(sizes: list[int], offset: float, scale: float, seed: int) -> None:
    """Behaviour 18: parts of any size, also without values, and means much larger than deviations."""
    generator = torch.Generator().manual_seed(seed)
    whole = offset + scale * torch.randn(sum(sizes), 3, 2, generator=generator, dtype=torch.float64)
    found = combined([moments_of(part) for part in whole.split(sizes)])
    assert found.count == 2 * sum(sizes)
    if sum(sizes):
        exact = whole.mean((0, 2))
        deviations = (whole - exact[:, None]).square().sum((0, 2))
        unit = offset * 2.0**-52  # what values were rounded by
        torch.testing.assert_close(found.mean, exact, rtol=1e-12, atol=abs(unit) + 1e-12 * scale)
        torch.testing.assert_close(found.deviations, deviations, rtol=1e-9 + 4 * abs(unit) / scale, atol=1e-12)


def test_a_sum_of_squares_would_not_do() -> None:
    """Behaviour 18: what the formula of Chan et al. is there for."""
    whole = torch.tensor([[1e9], [1e9 + 1], [1e9 + 2], [1e9 + 3]], dtype=torch.float64)
    found = combined([moments_of(whole[:1]), moments_of(whole[1:])])
    assert float(found.deviations) == 5.0
    assert float(whole.square().mean() - whole.mean().square()) != 1.25


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_values_are_not_summed_narrowly(dtype: torch.dtype) -> None:
    """Behaviour 18: 4,097 ones and a two; in 16 bits the sum would stop growing on the way."""
    values = torch.ones(4098, 1).to(dtype)
    values[0] = 2
    found = moments_of(values)
    assert float(found.mean) == pytest.approx(4099 / 4098, rel=1e-6)
    assert float(found.deviations) == pytest.approx(4097 / 4098, rel=1e-3)
