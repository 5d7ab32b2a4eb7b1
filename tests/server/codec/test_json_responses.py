"""Tests of JSON responses and errors: exact float32, the digits of every float16, columns or rows,
and counts of unknown ids."""

import json
from decimal import Decimal

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.fake_engine import FakeEngine, model_info
from server.fake_models import unpooled_info
from server.strategies import bags_of

from embedserve.codec.float16_digits import shortest_float16_repr
from embedserve.codec.json_codec import encode_error, encode_result
from embedserve.errors import InvalidRequestError
from embedserve.lookup_types import LookupResult

UNPOOLED = FakeEngine(unpooled_info())


@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=9, max_size=9))
def test_float32_values_round_trip_through_json(bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    values[~np.isfinite(values)] = np.finfo(np.float32).max
    response = json.loads(encode_result(LookupResult(model_info(), values.reshape(1, 9))))
    read = np.array(response["values"], np.float64).astype(np.float32)
    assert read.reshape(-1).view(np.uint32).tolist() == values.view(np.uint32).tolist()


def test_infinite_values_are_null() -> None:
    values = np.array([[np.inf, -np.inf, 1.5, *[0.0] * 6]], np.float32)
    response = json.loads(encode_result(LookupResult(model_info(), values)))
    assert response["values"][0][:3] == [None, None, 1.5]


@given(bits=st.lists(st.integers(0, 2**16 - 1), min_size=18, max_size=18))
def test_float16_values_round_trip_through_json(bits: list[int]) -> None:
    values = np.array(bits, np.uint16).view(np.float16)
    values[~np.isfinite(values)] = np.finfo(np.float16).max
    response = json.loads(encode_result(LookupResult(model_info(), values.reshape(2, 9))))
    read = np.array(response["values"], np.float64).astype(np.float16)
    assert read.reshape(-1).view(np.uint16).tolist() == values.view(np.uint16).tolist()


def test_float16_response_names_its_dtype_and_has_few_digits() -> None:
    values = np.array([[0.1, np.inf, -2.5, *[0.0] * 6]], np.float16)
    encoded = encode_result(LookupResult(model_info(), values, {"movie": 2}))
    response = json.loads(encoded)
    assert response["output_dtype"] == "float16"
    assert b"[[0.1,null,-2.5,0.0," in encoded
    del response["output_dtype"]
    whole = json.loads(encode_result(LookupResult(model_info(), values, {"movie": 2})))
    assert list(response) == [key for key in whole if key != "output_dtype"]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_chunked_result_is_encoded_like_the_joined_result(dtype: type[np.floating]) -> None:
    values = np.random.default_rng(1).standard_normal((7, 9)).astype(dtype)
    chunked = LookupResult(model_info(), values[:3], extra_chunks=[values[3:4], values[4:]])
    assert encode_result(chunked) == encode_result(LookupResult(model_info(), values))


def test_response_names_model_version_keys_and_lengths() -> None:
    response = json.loads(encode_result(LookupResult(model_info(), np.zeros((2, 9), np.float32))))
    assert response == {
        "model": "shop",
        "version": 7,
        "keys": ["user", "movie", "tag"],
        "length_per_key": [4, 3, 2],
        "values": [[0.0] * 9] * 2,
    }


def test_unknown_id_counts_precede_the_values() -> None:
    result = LookupResult(model_info(), np.zeros((1, 9), np.float32), {"movie": 2, "tag": 1})
    response = json.loads(encode_result(result))
    assert response["unknown_ids"] == {"movie": 2, "tag": 1}
    assert list(response)[-2:] == ["unknown_ids", "values"]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@given(data=st.data())
def test_unpooled_response_has_lengths_and_a_vector_per_id(
    dtype: type[np.floating], data: st.DataObject
) -> None:
    bags = data.draw(bags_of(UNPOOLED.model))
    lengths = UNPOOLED.expected_lengths(bags)
    values = UNPOOLED.expected(bags).astype(dtype)
    result = LookupResult(UNPOOLED.model, values, None, np.array(lengths, np.int32))
    response = json.loads(encode_result(result))
    keys = ["item@t_item", "last", "tag", "item@t_again"]
    dtype_field = ["output_dtype"] if dtype is np.float16 else []
    first = ["model", "version", "keys", "length_per_key"]
    assert list(response) == [*first, *dtype_field, "lengths", "values"]
    assert (response["keys"], response["length_per_key"]) == (keys, [4] * 4)
    assert response["lengths"] == dict(zip(keys, lengths, strict=True))
    assert list(response["values"]) == keys
    rows = [row for key in keys for row in response["values"][key]]
    assert [len(response["values"][key]) for key in keys] == [sum(row) for row in lengths]
    assert np.array_equal(np.array(rows, dtype).reshape(-1, 4), values)


def test_error_has_code_message_and_field() -> None:
    error = InvalidRequestError("features.user[0] is -1: …", "features.user[0]")
    assert json.loads(encode_error(error)) == {
        "error": {
            "code": "INVALID_ARGUMENT",
            "message": "features.user[0] is -1: …",
            "field": "features.user[0]",
        }
    }


EVERY = np.arange(2**16, dtype=np.uint16).view(np.float16)
FINITE = EVERY[np.isfinite(EVERY)]


def json_of(values: np.ndarray) -> str:
    return orjson.dumps(shortest_float16_repr(values), option=orjson.OPT_SERIALIZE_NUMPY).decode()


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_every_finite_float16_round_trips(dtype: type[np.floating]) -> None:
    read = np.array(json.loads(json_of(FINITE)), dtype)
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
