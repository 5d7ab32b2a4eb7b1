"""Tests of the size estimate of undecoded requests: never above the size, and close to it."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.open_inference import LENGTH_HEADER, InferRequest, Input, jagged
from server.strategies import bags_of_ids, weights_or_none

from embedserve.codec import embed_request_fields, json_codec
from embedserve.codec.embed_request_fields import INLINE_FIELDS_MAX
from embedserve.codec.open_inference import bodies, infer_messages
from embedserve_proto import embedding_pb2 as pb


@given(
    ids=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50),
    lengths=st.lists(st.integers(0, 2**31 - 1), max_size=50),
    is_raw=st.booleans(),
)
def test_protobuf_estimate_is_exact(ids: list[int], lengths: list[int], is_raw: bool) -> None:
    message = pb.EmbedRequest(model="shop", keys=["user", "item"], weights=[1.0] * len(ids))
    if is_raw:
        message.ids_bytes = np.array(ids, "<i8").tobytes()
        message.lengths_bytes = np.array(lengths, "<i4").tobytes()
    else:
        message.ids.extend(ids)
        message.lengths.extend(lengths)
    assert embed_request_fields.estimate_size(message.SerializeToString()) == (
        len(lengths),
        len(ids),
    )


@given(
    bags=bags_of_ids(),
    padded=st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), max_size=3),
)
def test_open_inference_estimate_equals_the_declared_shapes(
    bags: dict[str, list[list[int]]], padded: list[list[int]]
) -> None:
    inputs = jagged(bags)
    inputs += [Input("more", "INT64", padded)] if padded else []
    infer_request = InferRequest(inputs)
    flat = [bag for feature in (*bags.values(), padded) for bag in feature]
    expected = len(flat), sum(map(len, flat))
    assert bodies.estimate_size(infer_request.json_body()) == expected
    body, headers = infer_request.binary_body()
    assert bodies.estimate_size(body, int(headers[LENGTH_HEADER])) == expected
    for is_raw in (True, False):
        message = infer_request.message("shop", is_raw=is_raw).SerializeToString()
        assert infer_messages.estimate_size(message) == expected


@pytest.mark.parametrize("size", [-1, 2**62])
def test_estimate_of_false_shapes_is_at_most_the_body_size(size: int) -> None:
    infer_request = InferRequest([Input("f.ids", "INT64", [1], [size])])
    for estimate_size, body in (
        (bodies.estimate_size, infer_request.json_body()),
        (
            infer_messages.estimate_size,
            infer_request.message("shop", is_raw=True).SerializeToString(),
        ),
    ):
        assert estimate_size(body) == (0, len(body) if size > 0 else 0)


@given(st.binary(max_size=200))
def test_estimate_of_garbage_is_at_most_the_body_size(body: bytes) -> None:
    for estimate_size in (
        embed_request_fields.estimate_size,
        json_codec.estimate_size,
        bodies.estimate_size,
        infer_messages.estimate_size,
    ):
        bags, ids = estimate_size(body)
        assert 0 <= bags <= len(body)
        assert 0 <= ids <= len(body)


@pytest.mark.parametrize(("more", "sizes"), [(0, (1, 1)), (1, (0, 0))])
def test_protobuf_estimate_is_zero_beyond_the_field_limit(
    more: int, sizes: tuple[int, int]
) -> None:
    body = pb.EmbedRequest(ids=[1], lengths=[1]).SerializeToString()
    body += pb.EmbedRequest(keys=[""] * (INLINE_FIELDS_MAX - 2 + more)).SerializeToString()
    assert embed_request_fields.estimate_size(body) == sizes


@given(data=st.data(), output_dtype=st.sampled_from(["float32", "float16", None]))
def test_json_estimate_does_not_exceed_the_actual_size(
    data: st.DataObject, output_dtype: str | None
) -> None:
    features = data.draw(bags_of_ids())
    weights = data.draw(weights_or_none(features))
    body: dict[str, object] = {"features": features}
    body |= {"weights": weights} if weights else {}
    body |= {"output_dtype": output_dtype} if output_dtype else {}
    bags, ids = json_codec.estimate_size(json.dumps(body).encode())
    flat = [bag for feature in features.values() for bag in feature]
    assert bags == len(flat)
    assert ids <= sum(map(len, flat))


def test_json_estimate_with_string_ids_is_zero() -> None:
    body = json.dumps({"features": {"word": [["a,b,[c,,,,,,,,,"]]}})
    assert json_codec.estimate_size(body.encode()) == (0, 0)


@pytest.mark.parametrize("weights", [{}, {"weights": {"user": [[0.5] * 1000] * 10}}])
def test_json_estimate_of_long_bags_is_close_to_the_actual_size(weights: dict[str, object]) -> None:
    body = json.dumps({"features": {"user": [[7] * 1000] * 10}} | weights)
    bags, ids = json_codec.estimate_size(body.encode())
    assert bags == 10
    assert 9980 < ids <= 10_000
