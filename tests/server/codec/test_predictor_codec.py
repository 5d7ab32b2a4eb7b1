"""Tests of PredictionRequest: it is read like the EmbedRequest with the same bags. Garbage is
rejected."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.fake_engine import FEATURES
from server.fake_models import model_info
from server.predictions import prediction_request
from server.strategies import bags_of_ids, weights_or_none

from embedserve.batching.join import adapt_to_model
from embedserve.codec import predictor_codec
from embedserve.codec.protobuf_codec import ProtobufDecoder
from embedserve.errors import InvalidRequestError, RequestTooLargeError
from embedserve_proto import embedding_pb2, predictor_pb2

MODEL = model_info()
KEYS = tuple(FEATURES)


@given(data=st.data(), dtype=st.sampled_from(["<i8", "<i4"]), scored=st.integers(0, 3))
def test_prediction_request_is_read_like_an_embed_request(
    data: st.DataObject, dtype: str, scored: int
) -> None:
    bags = data.draw(bags_of_ids(all_features=True))
    weights = data.draw(weights_or_none(bags)) or {}
    weights = {name: weights[name] for name in KEYS[3 - scored :] if name in weights}
    body = prediction_request(KEYS, bags, weights, dtype).SerializeToString()
    flat = [bag for name in KEYS for bag in bags[name]]
    other = embedding_pb2.EmbedRequest(
        keys=KEYS, ids=[one for bag in flat for one in bag], lengths=[len(bag) for bag in flat]
    )
    if weights:
        of_all = {name: [[1.0] * len(bag) for bag in bags[name]] for name in KEYS} | weights
        other.weights.extend([one for name in KEYS for bag in of_all[name] for one in bag])
    read = adapt_to_model(predictor_codec.decode_request(body), MODEL)
    expected = adapt_to_model(ProtobufDecoder().decode_request(other.SerializeToString()), MODEL)
    assert (read.features, read.batch_size) == (expected.features, expected.batch_size)
    assert np.array_equal(read.ids, expected.ids)
    assert read.ids.dtype == expected.ids.dtype
    assert np.array_equal(read.lengths, expected.lengths)
    given_weights = np.ones(0) if expected.weights is None else expected.weights
    assert np.array_equal(np.ones(0) if read.weights is None else read.weights, given_weights)
    bag_count, id_count = predictor_codec.estimate_size(body)
    assert bag_count == read.lengths.size
    assert id_count <= read.ids.size
    if dtype == "<i8":
        assert id_count == read.ids.size


@given(st.binary(max_size=200))
def test_garbage_is_rejected(body: bytes) -> None:
    bags, ids = predictor_codec.estimate_size(body)
    assert 0 <= bags <= len(body)
    assert 0 <= ids <= len(body)
    with pytest.raises((InvalidRequestError, RequestTooLargeError)):
        adapt_to_model(predictor_codec.decode_request(body), MODEL)


def test_split_and_repeated_fields_are_merged_like_by_protobuf() -> None:
    bags = {name: [[1], [2]] for name in KEYS}
    request = prediction_request(KEYS, bags)
    halves = predictor_pb2.PredictionRequest(), predictor_pb2.PredictionRequest(batch_size=2)
    halves[0].id_list_features.num_features = 7
    halves[0].id_list_features.lengths = request.id_list_features.lengths
    halves[1].id_list_features.num_features = 3
    halves[1].id_list_features.values = request.id_list_features.values
    body = b"".join(one.SerializeToString() for one in halves)
    assert predictor_pb2.PredictionRequest.FromString(body) == request
    read = predictor_codec.decode_request(body)
    assert read.ids.tolist() == [1, 2] * 3
    assert read.batch_size == 2
