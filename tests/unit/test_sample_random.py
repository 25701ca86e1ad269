"""Random numbers of samples: the same for a sample wherever it lies, uniform and normal, and never to change."""

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpidp.errors import DataError
from mpidp.hdf5.loader import HDF5Loader
from mpidp.hdf5.transform import SampleRandom, transform_batch, transform_samples, wants_random

CPU = torch.device("cpu")


def random(indices: list[int] | np.ndarray, seed: int = 1, epoch: int = 0) -> SampleRandom:
    return SampleRandom(seed, epoch, np.array(indices, dtype=np.int64), CPU)


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=30), st.data())
def test_a_sample_draws_the_same_in_any_batch(indices: list[int], data: st.DataObject) -> None:
    """Behaviour 24: its numbers depend on seed, epoch, row and what was drawn before; not on the batch."""
    alone = data.draw(st.sampled_from(indices))
    place = indices.index(alone)
    several, one = random(indices), random([alone])
    for _ in range(2):
        assert torch.equal(several.uniform(2, 3)[place], one.uniform(2, 3)[0])
        assert torch.equal(several.normal(5)[place], one.normal(5)[0])
        assert several.integers(7)[place] == one.integers(7)[0]
    seeds = [generator.initial_seed() for generator in several.generators()]
    assert seeds[place] == next(one.generators()).initial_seed()


def test_seed_epoch_and_row_matter() -> None:
    drawn = {
        tuple(random([row], seed, epoch).uniform(3)[0].tolist())
        for row in range(20)
        for seed in (0, 1, 2**63)
        for epoch in (0, 1)
    }
    assert len(drawn) == 120


def test_golden_values() -> None:
    """They are part of what a resumed run repeats: any change of them is a change of everybody's runs."""
    drawn = random([0, 1, 10**10], seed=7, epoch=3)
    np.testing.assert_array_equal(drawn.integers(10**6, 2), GOLDEN_INTEGERS)
    np.testing.assert_allclose(drawn.normal(), GOLDEN_NORMAL, rtol=1e-6)


GOLDEN_INTEGERS = [[566338, 850105], [244143, 25279], [56892, 657110]]
GOLDEN_NORMAL = [0.85526252, -0.66210818, 0.44748747]


def test_uniform() -> None:
    """Mean, variance, range and independence of 400,000 numbers, within five standard deviations."""
    drawn = random(np.arange(4000)).uniform(100).double()
    assert drawn.min() >= 0 and drawn.max() < 1 + 1e-7
    assert drawn.mean().item() == pytest.approx(0.5, abs=5 * (1 / 12 / 400_000) ** 0.5)
    assert drawn.var().item() == pytest.approx(1 / 12, rel=0.01)
    counts = torch.histc(drawn, 20, 0, 1)
    assert (counts - 20_000).abs().max() < 5 * 20_000**0.5
    for first, second in ((drawn[:, :-1], drawn[:, 1:]), (drawn[:-1], drawn[1:])):  # neighbours in a sample, samples
        product = ((first - 0.5) * (second - 0.5)).mean().item()
        assert abs(product) < 5 / 12 / first.numel() ** 0.5


def test_normal() -> None:
    drawn = random(np.arange(4000)).normal(100).double()
    assert torch.isfinite(drawn).all()
    assert drawn.mean().item() == pytest.approx(0, abs=5 / 400_000**0.5)
    assert drawn.var().item() == pytest.approx(1, abs=5 * (2 / 400_000) ** 0.5)
    assert (drawn**3).mean().item() == pytest.approx(0, abs=5 * (15 / 400_000) ** 0.5)
    assert (drawn**4).mean().item() == pytest.approx(3, abs=5 * (96 / 400_000) ** 0.5)


def test_integers() -> None:
    drawn = random(np.arange(10_000)).integers(6)
    assert drawn.dtype == torch.int64 and set(drawn.tolist()) == set(range(6))
    assert random([1, 2]).integers(2**32, 4, 5).shape == (2, 4, 5)
    assert random([5]).integers(1).tolist() == [0]


def test_shapes_and_no_samples() -> None:
    assert random([1, 2]).uniform().shape == (2,) and random([1, 2]).normal(3, 1).dtype == torch.float32
    none = random([])
    assert none.uniform(3).shape == (0, 3) and none.normal().shape == (0,) and not list(none.generators())


def test_transforms_may_want_random_numbers() -> None:
    """Those with a second argument that must be given get them."""

    def default(fields: dict[str, torch.Tensor], p: float = 0.5) -> dict[str, torch.Tensor]:
        return fields

    assert not wants_random(default) and not wants_random(lambda fields: fields)
    assert wants_random(lambda fields, random: fields)
    fields = {"x": torch.zeros(3, 2)}
    made = transform_batch(lambda f, r: {"x": f["x"] + r.uniform(1)}, fields, random([4, 5, 6]), 3)
    assert torch.equal(made["x"][:, 0], random([4, 5, 6]).uniform())


def test_sample_transforms() -> None:
    fields = {"x": torch.arange(6.0).reshape(3, 2)}
    crop = lambda sample, generator: {"z": sample["x"][torch.randint(2, (1,), generator=generator)]}  # noqa: E731
    made = transform_samples(crop, fields, random([4, 5, 6]), 3)
    assert made["z"].shape == (3, 1)
    assert torch.equal(transform_samples(crop, {"x": fields["x"][1:2]}, random([5]), 1)["z"], made["z"][1:2])
    assert transform_samples(crop, fields, random([]), 0) is fields
    uneven = lambda sample, generator: {"x": sample["x"][: int(sample["x"][0]) // 2]}  # noqa: E731
    with pytest.raises(DataError, match="sample_transform must return the same fields, in the same shapes"):
        transform_samples(uneven, fields, random([1, 2, 3]), 3)


@pytest.mark.parametrize("kind", ["transform", "sample_transform"])
def test_augmentation_does_not_depend_on_the_batch(tmp_path: Path, kind: str) -> None:
    """Behaviour 24: a sample becomes the same with another global batch and behind a resume; new each epoch."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.zeros(50, "f4"), chunks=(8,))
    functions = {
        "transform": lambda fields, random: {"x": fields["x"] + random.normal()},
        "sample_transform": lambda sample, generator: {"x": sample["x"] + torch.randn((), generator=generator)},
    }

    def epoch(loader: HDF5Loader) -> dict[int, float]:
        return {
            row: value for batch in loader for row, value in zip(batch.indices.tolist(), batch.x.tolist(), strict=True)
        }

    one = HDF5Loader(tmp_path / "a.h5", ("x",), 7, streams=2, **{kind: functions[kind]})
    other = HDF5Loader(tmp_path / "a.h5", ("x",), 20, streams=4, shuffle="full", **{kind: functions[kind]})
    first, second = epoch(one), epoch(one)
    assert first == epoch(other) and second == epoch(other) and first != second and len(set(first.values())) == 50
    again = HDF5Loader(tmp_path / "a.h5", ("x",), 9, streams=2, **{kind: functions[kind]})
    again.load_state_dict({**one.state_dict(), "epoch": 1, "position": 21})
    rest = epoch(again)
    assert len(rest) == 29 and rest.items() <= second.items()
    for loader in (one, other, again):
        loader.close()
