"""Tests of the JSON of POST /embed: valid requests, and the error of each invalid one."""

import contextlib
import gc
import json
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from server.fake_engine import Bags, make_request
from server.fake_models import ruled_info
from server.strategies import JSON_VALUE, bags_of, bags_of_ids, mutated_json, weights_or_none

from embedserve.codec.json_codec import decode_request, encode_error
from embedserve.codec.json_errors import CHUNK, explain_invalid_json
from embedserve.errors import InvalidRequestError
from embedserve.lookup_types import LookupRequest

RULED = ruled_info()


def weights_equal(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return one is other if one is None or other is None else np.array_equal(one, other)


def requests_equal(one: LookupRequest, other: LookupRequest) -> bool:
    return (
        one.features == other.features
        and one.batch_size == other.batch_size
        and np.array_equal(one.ids, other.ids)
        and np.array_equal(one.lengths, other.lengths)
        and weights_equal(one.weights, other.weights)
        and one.string_features == other.string_features
        and (one.strings or {}) == (other.strings or {})
        and one.output_dtype == other.output_dtype
    )


@pytest.mark.parametrize(
    "all_bags", [bags_of_ids(), bags_of(RULED)], ids=["integers", "integers and strings"]
)
@given(data=st.data())
def test_bags_become_the_flat_arrays_of_a_keyed_jagged_tensor(
    all_bags: st.SearchStrategy[Bags], data: st.DataObject
) -> None:
    """Checks that strings are hashed, and kept for error messages."""
    bags = data.draw(all_bags)
    weights = data.draw(weights_or_none(bags))
    body = json.dumps({"features": bags} | ({"weights": weights} if weights else {}))
    request = decode_request(body.encode(), "shop")
    assert requests_equal(request, make_request(bags, weights))
    assert request.model == "shop"
    assert (request.ids.dtype, request.lengths.dtype) == (np.dtype(np.int64), np.dtype(np.int32))


@given(data=st.data())
def test_integers_may_be_sent_as_strings(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=8))
    as_sent = [data.draw(st.sampled_from([one, str(one)])) for one in ids]
    bags = data.draw(st.sampled_from([as_sent, [as_sent], [as_sent[:1], as_sent[1:]]]))
    request = decode_request(json.dumps({"features": {"user": bags}}).encode(), "")
    if set(map(type, as_sent)) == {str}:  # possibly names: the table's rule decides
        assert request.strings is not None
        assert np.array_equal(request.strings.integers["user"], ids)
        assert request.string_features == {"user"}
    else:
        assert request.ids.tolist() == ids
        assert not request.string_features


@pytest.mark.parametrize(
    ("features", "bags"),
    [
        ({"user": [1, 2]}, {"user": [[1, 2]]}),
        ({"user": [], "tag": [3]}, {"user": [[]], "tag": [[3]]}),
        ({"user": [1], "tag": [[3, 4]]}, {"user": [[1]], "tag": [[3, 4]]}),
        ({"user": [[]]}, {"user": [[]]}),
        ({"tag": ["a", "é"], "user": [1]}, {"tag": [["a", "é"]], "user": [[1]]}),
    ],
)
def test_flat_list_is_a_batch_of_one(features: dict[str, list[Any]], bags: Bags) -> None:
    body = json.dumps({"features": features}).encode()
    assert requests_equal(decode_request(body, ""), make_request(bags))


def test_ids_of_features_without_weights_have_weight_one() -> None:
    body = b'{"features": {"user": [[1, 2]], "tag": [[3]]}, "weights": {"tag": [[0.5]]}}'
    weights = decode_request(body, "").weights
    assert weights is not None
    assert weights.tolist() == [1.0, 1.0, 0.5]


@pytest.mark.parametrize("features", ['{"user": [1, 2]}', '{"user": ["a", "b"]}'])
def test_output_dtype_is_read_and_defaults_to_float32(features: str) -> None:
    plain = decode_request(b'{"features": %b}' % features.encode(), "")
    assert plain.output_dtype == "float32"
    for name in ("float32", "float16"):
        body = f'{{"features": {features}, "output_dtype": "{name}"}}'
        request = decode_request(body.encode(), "")
        assert request.output_dtype == name
        request.output_dtype = "float32"
        assert requests_equal(request, plain)


def test_null_stands_for_an_optional_field_that_is_left_out() -> None:
    features = {"features": {"user": [1]}}
    optional = ("weights", "version", "output_dtype", "output_keys", "min_seq")
    nulls = decode_request(json.dumps(features | dict.fromkeys(optional)).encode(), "")
    plain = decode_request(json.dumps(features).encode(), "")
    assert requests_equal(nulls, plain)
    assert (nulls.model, nulls.output, nulls.min_seq) == ("", None, None)


@pytest.mark.parametrize("limit", [-(2**63), 2**63 - 1])
def test_ids_keep_all_64_bits(limit: int) -> None:
    body = json.dumps({"features": {"user": [limit]}}).encode()
    assert decode_request(body, "").ids.tolist() == [limit]


DEEP = "[" * 100_000 + "]" * 100_000
"""Nesting deeper than Python's json parses in any version: 3.13 parses deeper than 3.11."""

INVALID_BODIES = [
    # (body, field of the error, what the message contains besides)
    ("", "body", "is empty"),
    ("  ", "body", "is empty"),
    ("{", "body", "is not JSON"),
    ('{"features": {"user": [1]}} x', "body", "Extra data"),
    ("[1]", "body", "is [1], expected an object"),
    ("null", "body", "is null"),
    (DEEP, "body", "nested too deep"),
    ('{"features": {"user": ' + DEEP + "}}", "body", "nested too deep"),
    ("{}", "features", "is missing"),
    ('{"features": null}', "features", "is null"),
    ('{"features": [1]}', "features", "is [1]"),
    ('{"features": {}}', "features", "is {}"),
    ('{"features": {"user": [1]}, "batch": 2}', "batch", "is not a field"),
    ('{"features": {"user": [1]}, "": 2}', '""', "is not a field"),
    ('{"features": {"user": 5}}', "features.user", "is 5"),
    ('{"features": {"user": []}}', "features.user", "an empty batch"),
    ('{"features": {"user": [], "tag": []}}', "features.user", "an empty batch"),
    ('{"features": {"user": [1.5]}}', "features.user[0]", "is 1.5"),
    ('{"features": {"user": [1.0]}}', "features.user[0]", "is 1.0"),
    ('{"features": {"user": [1, true]}}', "features.user[1]", "is true"),
    ('{"features": {"user": [7, "x"]}}', "features.user[1]", 'is "x": ids are integers, or'),
    ('{"features": {"user": [7, "+1"]}}', "features.user[1]", 'is "+1": ids are integers, or'),
    ('{"features": {"user": [["7"], [7, " 1"]]}}', "features.user[1][1]", 'is " 1": ids are'),
    ('{"features": {"user": ["7", 7, 1.0]}}', "features.user[2]", "is 1.0: ids are integers, or"),
    ('{"features": {"user": [7, "9223372036854775808"]}}', "features.user[1]", "ids are integers"),
    ('{"features": {"user": ["7", 9223372036854775808]}}', "features.user[1]", "64-bit"),
    ('{"features": {"user": [["x"], [7]]}}', "features.user[0][0]", 'is "x": ids are integers'),
    ('{"features": {"user": [["abc", 12]]}}', "features.user[0][0]", 'is "abc": ids are integers'),
    ('{"features": {"user": [["a"], ["b", 12]]}}', "features.user[1][1]", "is 12: most ids of"),
    ('{"features": {"user": [[], ["7", null]]}}', "features.user[1][1]", "is null"),
    ('{"features": {"user": ["7", ["7"]]}}', "features.user[1]", 'is ["7"]'),
    ('{"features": {"user": [["7"], "7"]}}', "features.user[1]", 'is "7": expected a list'),
    ('{"features": {"user": ["\\ud800"]}}', "features.user[0]", 'is "\\ud800": half'),
    ('{"features": {"user": "7"}}', "features.user", 'is "7"'),
    ('{"features": {"user": [[1], [null]]}}', "features.user[1][0]", "is null"),
    ('{"features": {"user": [NaN]}}', "features.user[0]", "is NaN"),
    ('{"features": {"user": [9223372036854775808]}}', "features.user[0]", "9223372036854775808"),
    ('{"features": {"user": [-9223372036854775809]}}', "features.user[0]", "64-bit"),
    ('{"features": {"user": [1, [2]]}}', "features.user[1]", "is [2]"),
    ('{"features": {"user": [[1], 2]}}', "features.user[1]", "is 2"),
    ('{"features": {"user": [[[1]]]}}', "features.user[0][0]", "is [1]"),
    ('{"features": {"user": [[1], [2]], "tag": [[3]]}}', "features.tag", "1 example, but"),
    ('{"features": {"user": [[1], [2]], "tag": [3]}}', "features.tag", "has 2 examples"),
    ('{"features": {"user": [1]}, "weights": 2}', "weights", "is 2"),
    ('{"features": {"user": [1]}, "weights": {"tag": [1]}}', "weights.tag", "no features.tag"),
    ('{"features": {"user": [1]}, "weights": {"user": 1}}', "weights.user", "is 1"),
    ('{"features": {"user": [1]}, "weights": {"user": [1, 2]}}', "weights.user[0]", "2 weights"),
    ('{"features": {"user": [1]}, "weights": {"user": []}}', "weights.user[0]", "0 weights"),
    ('{"features": {"user": [[1], [2]]}, "weights": {"user": [[1]]}}', "weights.user", "1 exam"),
    ('{"features": {"user": [1]}, "weights": {"user": ["x"]}}', "weights.user[0]", 'is "x"'),
    ('{"features": {"user": [1]}, "weights": {"user": [true]}}', "weights.user[0]", "is true"),
    ('{"features": {"user": [1]}, "weights": {"user": [NaN]}}', "weights.user[0]", "is NaN"),
    ('{"features": {"user": [1]}, "weights": {"user": [1e999]}}', "weights.user[0]", "Infinity"),
    ('{"features": {"user": [1]}, "weights": {"user": [-1e39]}}', "weights.user[0]", "is -1e+39"),
    (
        '{"features": {"user": [1]}, "weights": {"user": [1%s]}}' % ("0" * 39),
        "weights.user[0]",
        "float32",
    ),
    *[
        (
            '{"features": {"user": [1]}, "output_dtype": ' + value + "}",
            "output_dtype",
            f"is {value}",
        )
        for value in ("16", "true", '""', '"FLOAT16"', '"int8"', '["float16"]', "{}", "NaN")
    ],
    ('{"features": {"user": [1]}, "output_dtype": "\\ud800"}', "output_dtype", 'is "\\ud800"'),
    ('{"features": {"user": ["a"]}, "output_dtype": "x"}', "output_dtype", 'or "float16"'),
    ('{"features": {"user": [1]}, "output_dtype": ' + DEEP + "}", "body", "nested too deep"),
    ('{"features": {"user": [1]}, "dtype": 1}', "dtype", "features, weights, output_dtype"),
    ('{"features": {"user": [%s]}}' % ("1" * 5000), "body", "has an integer of more than 4300 dig"),
    ('{"features": {"user": [1]}, "version": %s}' % ("1" * 5000), "body", "more than 4300 digits"),
    ('{"features": {"user": [1]}, "version": 1.5}', "version", "is 1.5, expected a number or an"),
    ('{"features": {"user": [1]}, "version": [1]}', "version", "is [1], expected a number or an"),
]


@pytest.mark.parametrize(("body", "field", "problem"), INVALID_BODIES)
def test_invalid_body_is_rejected_with_field_and_value(body: str, field: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode_request(body.encode(), "")
    assert caught.value.field == field
    assert caught.value.message.startswith(field)
    assert problem in caught.value.message


@pytest.mark.parametrize(
    "body",
    [
        b'\xff{"features": {"user": [1]}}',
        b'\xef\xbb\xbf{"features": {"user": [1]}}',
        '{"features": {"user": [1]}}'.encode("utf-16"),
        b'{"features": {"user": [1%s]}}' % (b"0" * 5000),
        b'{"features": {"\\ud800": [1]}}',
        b'{"features": {"\\ud800": "x"}}',
        b'{"\\ud800": 1}',
        b'{"features": "twice", "features": {"user": [1]}}',
    ],
)
def test_unusual_encodings_are_rejected_with_an_encodable_error(body: bytes) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode_request(body, "")
    assert json.loads(encode_error(caught.value))["error"]["field"]


MANY = 3 * CHUNK + 7


@pytest.mark.parametrize(
    ("features", "weights", "message"),
    [
        (
            [1] * MANY + ["x"],
            None,
            f'features.user[{MANY}] is "x": ids are integers, or strings for a whole feature, '
            "and not all of this one are strings",
        ),
        (
            ["a"] * MANY + [7],
            None,
            f"features.user[{MANY}] is 7: most ids of this feature",
        ),
        (["1", 2] * MANY + ["a"], None, f'features.user[{2 * MANY}] is "a": ids are integers'),
        ([1] * MANY + [2**63], None, f"features.user[{MANY}] is {2**63}: ids are 64-bit"),
        ([1] * MANY + [True], None, f"features.user[{MANY}] is true: ids are integers"),
        ([[1]] * MANY + [[2, 2.5]], None, f"features.user[{MANY}][1] is 2.5: ids are integers"),
        ([[1]] * MANY + [7], None, f"features.user[{MANY}] is 7: expected a list of ids"),
        (
            [[1]] * MANY,
            [[1]] * (MANY - 1) + [[]],
            f"weights.user[{MANY - 1}] has 0 weights for 1 id",
        ),
        ([1] * MANY, [0.5] * (MANY - 1) + [1e39], f"weights.user[{MANY - 1}] is 1e+39: weights"),
        ([1] * MANY, [1] * (MANY - 1) + [10**400], f"weights.user[{MANY - 1}] is 1000"),
        ([1] * MANY, [1] * (MANY - 1) + ["x"], f'weights.user[{MANY - 1}] is "x": weights'),
    ],
)
def test_error_far_into_a_large_body_is_located(
    features: list[Any], weights: list[Any] | None, message: str
) -> None:
    body = {"features": {"user": features}} | ({"weights": {"user": weights}} if weights else {})
    with pytest.raises(InvalidRequestError) as caught:
        decode_request(json.dumps(body).encode(), "")
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize(
    ("ids", "weights", "shapes"),
    [([7], [1, 2], "2 weights for 1 id"), ([7, 8], [1], "1 weight for 2 ids")],
)
def test_counts_in_messages_are_singular_for_one(
    ids: list[int], weights: list[int], shapes: str
) -> None:
    body = {"features": {"user": [ids]}, "weights": {"user": [weights]}}
    with pytest.raises(InvalidRequestError) as caught:
        decode_request(json.dumps(body).encode(), "")
    assert caught.value.message == f"weights.user[0] has {shapes}"


def count_calls(run: Callable[[], object]) -> int:
    """Returns the number of Python function calls, and of generator resumptions, in ``run``."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize(
    "body",
    [
        {"features": {"user": [1] * 100_000 + ["x"]}},
        {"features": {"user": [[1]] * 100_000 + [["x"]]}},
        {"features": {"user": [["1"]] * 100_000 + [[2, "x"]]}},
        {
            "features": {"user": [[1]] * 100_000},
            "weights": {"user": [[0.5]] * 99_999 + [[0.5, 0.5]]},
        },
    ],
    ids=["flat", "bags", "strings", "weights"],
)
def test_diagnosis_calls_no_function_per_value(body: dict[str, Any]) -> None:
    """Checks that only values near the invalid one are examined individually, because the diagnosis
    runs on the event loop."""
    text = json.dumps(body).encode()
    assert explain_invalid_json(text) is not None
    assert count_calls(lambda: explain_invalid_json(text)) < 10_000


def test_encodings_other_than_utf8_are_reported_as_not_json() -> None:
    text = '{"features": {"user": [1]}}'
    for encoding in ("utf-8-sig", "utf-16", "utf-32"):
        found = explain_invalid_json(text.encode(encoding))
        assert found is not None
        assert found.message.startswith("body is not JSON: ")


def test_every_nesting_depth_is_rejected_as_invalid_request() -> None:
    """Covers depths near the recursion limit, where parsing may succeed while quoting the value
    fails."""
    for depth in range(3, 1100):
        for opening, closing in (("[", "]"), ('{"a":', "1}")):
            nested = opening * depth + closing * depth
            for body in (nested, '{"features": {"user": ["", ' + nested + "]}}"):
                with pytest.raises(InvalidRequestError):
                    decode_request(body.encode(), "")


OUTPUT_DTYPE = st.sampled_from(["float32", "float16"]) | JSON_VALUE


@given(parsed=mutated_json(), output_dtype=st.none() | st.tuples(OUTPUT_DTYPE))
@example(parsed={"features": {"user": [[1]]}}, output_dtype=(None,))
def test_mutated_body_is_decoded_or_rejected(parsed: Any, output_dtype: tuple[Any] | None) -> None:
    if output_dtype is not None:
        parsed["output_dtype"] = output_dtype[0]
    body = json.dumps(parsed).encode()
    found = explain_invalid_json(body)
    if found is not None:
        with pytest.raises(InvalidRequestError) as caught:
            decode_request(body, "")
        assert (caught.value.message, caught.value.field) == (found.message, found.field)
        assert json.loads(encode_error(found))["error"]["field"]
    else:
        request = decode_request(body, "")
        assert request.lengths.size == len(request.features) * request.batch_size
        assert request.lengths.sum() == request.ids.size
        assert request.weights is None or request.weights.size == request.ids.size
        assert request.output_dtype == (parsed.get("output_dtype") or "float32")


@given(body=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_random_bytes_are_rejected(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        decode_request(body, "")


def test_last_value_of_a_duplicate_feature_wins() -> None:
    """Checks what the OpenAPI document says. The parser does not report repeated names."""
    request = decode_request(b'{"features": {"user": [[1], [2]], "user": [3]}}', "")
    assert requests_equal(request, make_request({"user": [[3]]}))


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"features": {"user": [["a", 1]]}}', b'{"features": 1}']
)
def test_rejection_leaves_no_reference_cycle(body: bytes) -> None:
    """Guards against reference cycles, which would keep the frames and their data alive until
    garbage collection."""
    for _ in range(2):  # the first call creates objects that last
        gc.collect()
        with contextlib.suppress(InvalidRequestError):
            decode_request(body, "m")
    assert gc.collect() == 0
