"""Tests of rounding results to float16: the same values as numpy's, bit for bit."""

from collections.abc import Callable

import numpy as np
import pytest

from embedserve.engine.engine import Engine
from embedserve.engine.restore import restore
from embedserve_store import ModelVersion

ALL_FLOAT16 = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
RANDOM_FLOAT32 = (
    np.random.default_rng(0).integers(0, 2**32, 2**20, dtype=np.uint32).view(np.float32)
)


@pytest.fixture(scope="module")
def engine(published: Callable[..., ModelVersion]) -> Engine:
    return restore(published(), "cpu:1")


def same_bits(engine: Engine, values: np.ndarray) -> bool:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        expected = values.astype(np.float16)
    rounded = engine.to_float16(values)
    is_nan = np.isnan(expected)
    bits, expected_bits = rounded.view(np.uint16), expected.view(np.uint16)
    return (
        rounded.shape == values.shape
        and np.array_equal(np.isnan(rounded), is_nan)  # the other bits of nan may differ
        and np.array_equal(bits[~is_nan], expected_bits[~is_nan])
    )


def test_float16_values_are_unchanged(engine: Engine) -> None:
    """Checks all float16 values, including zeros, subnormals, infinities and nan."""
    assert same_bits(engine, ALL_FLOAT16.reshape(256, 256))


@pytest.mark.parametrize("towards", [-np.inf, None, np.inf])
def test_ties_round_to_even(engine: Engine, towards: float | None) -> None:
    """Checks ties and their neighbours: ties round to even, others to the nearest value.

    Half a step past 65504, values round to infinity.
    """
    finite = np.sort(ALL_FLOAT16[np.isfinite(ALL_FLOAT16)])
    half_way = np.append((finite[:-1] + finite[1:]) / 2, np.array([65520, -65520], np.float32))
    values = half_way if towards is None else np.nextafter(half_way, np.float32(towards))
    assert values.dtype == np.float32
    assert same_bits(engine, values)


def test_float32_values_are_rounded_like_numpy(engine: Engine) -> None:
    assert same_bits(engine, RANDOM_FLOAT32.reshape(1024, 1024))
