"""Train and validation rows: disjoint, complete, exact in number, fair to sorted files, the same every time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidp.errors import DataError
from mpidp.hdf5.order import Part, Split


@settings(deadline=None, max_examples=80)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.floats(0.01, 0.99), st.integers(0, 2**64 - 1))
def test_parts_are_disjoint_complete_and_exact(chunk_rows: list[int], fraction: float, seed: int) -> None:
    """Behaviour 26: no sample is in both parts, none in neither."""
    total = sum(chunk_rows)
    if not 0 < round(fraction * total) < total:
        with pytest.raises(DataError, match="both need at least one"):
            Split(np.array(chunk_rows), fraction, seed)
        return
    split = Split(np.array(chunk_rows), fraction, seed)
    assert split.counts("validation").sum() == round(fraction * total)
    for chunk, rows in enumerate(chunk_rows):
        parts: dict[Part, np.ndarray] = {part: split.rows(chunk, part) for part in ("train", "validation")}
        for part, offsets in parts.items():
            assert len(offsets) == split.counts(part)[chunk]
            assert np.all(np.diff(offsets) > 0)
        assert sorted([*parts["train"], *parts["validation"]]) == list(range(rows))
        assert abs(len(parts["validation"]) - rows * round(fraction * total) / total) < 1


def test_seed_decides() -> None:
    chunk_rows = np.full(10, 50)
    first, again, other = (Split(chunk_rows, 0.2, seed).rows(3, "validation").tolist() for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_chunks_of_one_row_depend_on_the_seed() -> None:
    """With one row a chunk the counts alone make the split; their phase comes from the seed."""
    found = {tuple(Split(np.ones(50, dtype=np.int64), 0.2, seed).counts("validation")) for seed in range(20)}
    assert len(found) == 5


def test_exact_beyond_32_bits() -> None:
    split = Split(np.full(1000, 10**7 + 1), 0.3, 0)
    assert split.counts("validation").sum() == round(0.3 * (10**7 + 1) * 1000)
    assert set(split.counts("validation")) == {3_000_000, 3_000_001}


def test_golden_split() -> None:
    """The split of existing runs: if this changes, a resumed run would train on validation rows."""
    split = Split(np.array([6, 5, 4]), 0.4, 9)
    assert [split.rows(chunk, "validation").tolist() for chunk in range(3)] == [[0, 2, 4], [1, 2], [1]]


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_fraction_out_of_range(fraction: float) -> None:
    with pytest.raises(DataError, match="between 0 and 1"):
        Split(np.array([10]), fraction, 0)


@pytest.mark.parametrize("rows", [[], [0], [1], [2]])
def test_too_few_rows(rows: list[int]) -> None:
    with pytest.raises(DataError, match="both need at least one"):
        Split(np.array(rows, dtype=np.int64), 0.1, 0)
