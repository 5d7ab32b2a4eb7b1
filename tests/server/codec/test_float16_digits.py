"""Tests of the digits of every float16."""

from __future__ import annotations

import json
from decimal import Decimal

import numpy as np
import orjson

from embedserve.codec.float16_digits import shortest_float16_repr

EVERY = np.arange(2**16, dtype=np.uint16).view(np.float16)
FINITE = EVERY[np.isfinite(EVERY)]


def json_of(values: np.ndarray) -> str:
    return orjson.dumps(shortest_float16_repr(values), option=orjson.OPT_SERIALIZE_NUMPY).decode()


def test_every_finite_float16_round_trips() -> None:
    read = np.array(json.loads(json_of(FINITE)), np.float64)
    assert np.array_equal(read.astype(np.float16).view(np.uint16), FINITE.view(np.uint16))


def test_every_finite_float16_round_trips_through_float32() -> None:
    read = np.array(json.loads(json_of(FINITE)), np.float32)
    assert np.array_equal(read.astype(np.float16).view(np.uint16), FINITE.view(np.uint16))


def test_values_are_written_with_the_fewest_identifying_digits() -> None:
    for text, value in zip(json_of(FINITE)[1:-1].split(","), FINITE, strict=True):
        digits = len(Decimal(text).normalize().as_tuple().digits)
        assert digits <= 5
        if digits > 1:
            with np.errstate(over="ignore"):
                assert np.float16(f"{value:.{digits - 2}e}") != value, text


def test_non_finite_values_are_null_and_shape_is_kept() -> None:
    values = np.array([[np.inf, -np.inf, np.nan], [0.1, -0.0, 65504]], np.float16)
    assert json_of(values) == "[[null,null,null],[0.1,-0.0,65500.0]]"
