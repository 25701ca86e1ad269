"""Stored values as batches hold them: every pair of types, scale and offset, bfloat16; never wrapped."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpidp.errors import DataError
from mpidp.hdf5.field import SUPPORTED, Converter, Field, FieldSpec, check_castable, narrow_to_bfloat16, widen_bfloat16

STORED = sorted(SUPPORTED, key=str)
TARGETS = ("", *(str(dtype) for dtype in STORED if str(dtype) not in ("uint16", "uint32", "uint64")), "bfloat16")


def converted(values: np.ndarray, **settings: object) -> np.ndarray:
    """The values as a batch would hold them."""
    field = Field("x", values.shape[1:], values.dtype.newbyteorder("="), **settings)  # type: ignore[arg-type]
    into = np.empty((len(values), *field.shape), field.dtype)
    Converter(field)(values, into)
    return into


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("stored", STORED, ids=str)
def test_every_pair_of_types(stored: np.dtype, target: str) -> None:
    """Behaviour 27: values that both types hold stay what they are, from either byte order; the rest is refused."""
    values = np.array([0, 1, 1, 0]).astype(stored).reshape(2, 2)
    field = Field("x", (2,), stored, target=target)
    if check_castable(stored, np.dtype("f4") if field.is_bfloat16 else field.dtype):
        return
    for given_values in (values, values.astype(stored.newbyteorder(">"))):
        found = converted(given_values, target=target)
        assert found.dtype == field.dtype and found.dtype.isnative
        numbers = widen_bfloat16(found) if field.is_bfloat16 else found
        np.testing.assert_array_equal(numbers, values)


@pytest.mark.parametrize(
    ("stored", "target", "text"),
    [
        ("f4", "i4", "fractions would be lost"),
        ("c8", "f4", "imaginary parts would be lost"),
        ("c8", "i8", "fractions would be lost"),
        ("u1", "?", "numbers are not true or false"),
    ],
)
def test_types_that_would_lose_something(stored: str, target: str, text: str) -> None:
    assert check_castable(np.dtype(stored), np.dtype(target)) == text


@pytest.mark.parametrize(
    ("value", "stored", "target"),
    [
        (300, "i4", "int8"),
        (-1, "i4", "uint8"),
        (2**63, "u8", ""),
        (2**31, "u4", "int32"),
        (-129, "i2", "int8"),
        (70000, "i4", "float16"),
        (1e39, "f8", "float32"),
        (1e39, "f8", "bfloat16"),
        (3.4e38, "f4", "bfloat16"),
        (1e300 + 1e300j, "c16", "complex64"),
    ],
)
def test_values_that_do_not_fit(value: complex, stored: str, target: str) -> None:
    """Behaviour 27: an error that says which value or type, and no other number."""
    values = np.array([0, value], stored)
    with pytest.raises(DataError, match="cannot hold; give a wider dtype"):
        converted(values, target=target)
    np.testing.assert_array_equal(converted(values[:1], target=target), 0)


@pytest.mark.parametrize(
    ("value", "stored", "target"), [(60000, "u2", "float16"), (1e38, "f4", ""), (1e300, "f8", "float32")]
)
def test_rescaled_values_that_do_not_fit(value: float, stored: str, target: str) -> None:
    with pytest.raises(DataError, match="cannot hold"):
        converted(np.array([value], stored), target=target, scale=10.0)


def test_values_that_are_not_finite_stay() -> None:
    values = np.array([np.inf, -np.inf, np.nan, 1.0])
    for target in ("float16", "float32", "bfloat16"):
        found = converted(values, target=target)
        numbers = widen_bfloat16(found) if target == "bfloat16" else found
        np.testing.assert_array_equal(numbers, values)


@given(st.lists(st.integers(0, 2**16 - 1), min_size=1), st.floats(0.1, 10), st.floats(-5, 5))
def test_scale_and_offset(numbers: list[int], scale: float, offset: float) -> None:
    """Of unsigned integers, in float32 and in float64."""
    values = np.array(numbers, ">u2")
    exact = np.array(numbers) * scale + offset
    assert converted(values, scale=scale, offset=offset).dtype == np.float32
    np.testing.assert_allclose(converted(values, scale=scale, offset=offset), exact, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(converted(values, scale=scale, offset=offset, target="float64"), exact, atol=1e-12)


@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_bfloat16_is_rounded_as_torch_does(numbers: list[float]) -> None:
    """To nearest, ties to even; NaN stays NaN, and an overflow is an error."""
    values = np.array(numbers, "f4")
    expected = torch.from_numpy(values).to(torch.bfloat16)
    if (expected.isinf().numpy() & np.isfinite(values)).any():
        with pytest.raises(FloatingPointError):
            narrow_to_bfloat16(values)
        return
    found = torch.from_numpy(narrow_to_bfloat16(values)).view(torch.bfloat16)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[~found.isnan()], expected[~expected.isnan()])
    np.testing.assert_array_equal(widen_bfloat16(narrow_to_bfloat16(values)), expected.float().numpy())


def test_stored_bfloat16() -> None:
    """As it is by default; as float32 where that is asked for or values are rescaled."""
    bits = narrow_to_bfloat16(np.array([1.5, -2.25, np.nan]))
    np.testing.assert_array_equal(converted(bits, stored_bfloat16=True), bits)
    np.testing.assert_array_equal(converted(bits, stored_bfloat16=True, target="float32"), [1.5, -2.25, np.nan])
    np.testing.assert_array_equal(converted(bits, stored_bfloat16=True, scale=2.0, offset=1.0), [4, -3.5, np.nan])
    again = converted(bits, stored_bfloat16=True, scale=2.0, target="bfloat16")
    np.testing.assert_array_equal(widen_bfloat16(again), [3, -4.5, np.nan])
    np.testing.assert_array_equal(converted(bits[:2], stored_bfloat16=True, target="float64"), [1.5, -2.25])


def test_decode_must_keep_shape_and_type() -> None:
    """What a decode function returned first is what it must return."""
    field = Field("x", (2,), np.dtype("f4"), decoded=True)
    into = np.empty((3, 2), "f4")
    Converter(field, lambda values: np.ones((len(values), 2), ">f4"))(np.zeros(3, "S2"), into)
    np.testing.assert_array_equal(into, 1)
    for wrong in (np.ones((3, 3), "f4"), np.ones((3, 2), "f8"), np.ones((2, 2), "f4"), np.float32(1)):
        with pytest.raises(DataError, match=r"decode returned .* at first it returned float32 of shape \(2,\)"):
            Converter(field, lambda values, wrong=wrong: wrong)(np.zeros(3, "S2"), into)


def test_nothing_to_convert() -> None:
    assert converted(np.zeros((0, 3), "u2")).shape == (0, 3)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"dtype": "uint16"}, 'dtype of field "x" is "uint16"; give one of .*bfloat16.*float32'),
        ({"dtype": "float"}, 'is "float"'),
        ({"scale": 0.0}, "finite, scale not 0"),
        ({"offset": float("nan")}, "finite, scale not 0"),
        ({"scale": 2.0, "dtype": "int8"}, "give a floating-point dtype"),
        ({"offset": 1.0, "dtype": "bool"}, "give a floating-point dtype"),
    ],
)
def test_specs_that_cannot_be(settings: dict[str, object], text: str) -> None:
    with pytest.raises(DataError, match=text):
        FieldSpec("x", **settings)  # type: ignore[arg-type]
