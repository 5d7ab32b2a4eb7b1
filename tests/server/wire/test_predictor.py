"""Tests of TorchRec's predictor.Predictor/Predict: results equal those of /embed.

Errors name the field and the sizes.
"""

import logging
from collections.abc import AsyncIterator, Callable

import grpc
import numpy as np
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from server.fake_engine import FEATURES, Bags, FakeEngine
from server.live import GRPC_SERVERS, Live, live_server
from server.predictions import predicted, prediction_request, sparse, weighted

from embedserve.codec.predictor_codec import log_ignored
from embedserve_proto import predictor_pb2 as pb
from embedserve_proto.predictor_pb2_grpc import PredictorStub

KEYS = tuple(FEATURES)
BAGS: Bags = {"user": [[4], [], [6]], "movie": [[], [10, 10], []], "tag": [[1], [2, 3], []]}


@pytest.fixture(params=GRPC_SERVERS)
async def live(request: pytest.FixtureRequest) -> AsyncIterator[Live]:
    async with live_server(FakeEngine(), grpc_server=request.param) as live:
        yield live


async def embedded(live: Live, body: dict[str, object]) -> np.ndarray:
    response = await live.http.post("/embed", json=body)
    assert response.status_code == 200, response.text
    return np.array(response.json()["values"], np.float32)


@pytest.mark.parametrize("examples", [1, 3])
async def test_ids_may_be_32_bit(live: Live, examples: int) -> None:
    bags = {name: of_feature[:examples] for name, of_feature in BAGS.items()}
    request = prediction_request(KEYS, bags, dtype="<i4")
    for _ in range(2):  # the second call uses what the first has cached
        response = await PredictorStub(live.channel).Predict(request)
        expected = await embedded(live, {"features": bags})
        assert np.array_equal(predicted(response, KEYS, examples), expected)
    assert live.outcomes("grpc") == {"OK": 2}


async def test_dense_features_are_ignored_and_logged_once(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    log_ignored.cache_clear()
    caplog.set_level(logging.INFO, "embedserve")
    request = prediction_request(KEYS, BAGS)
    request.float_features.MergeFrom(pb.FloatFeatures(num_features=13, values=b"odd"))
    request.embedding_features.MergeFrom(pb.FloatFeatures(num_features=0))
    request.unary_features.MergeFrom(pb.SparseFeatures(num_features=0))
    for _ in range(3):
        response = await PredictorStub(live.channel).Predict(request)
        expected = await embedded(live, {"features": BAGS})
        assert np.array_equal(predicted(response, KEYS, 3), expected)
    messages = [one.getMessage() for one in caplog.records if "not read" in one.getMessage()]
    assert len(messages) == 1
    assert "float_features" in messages[0]


Change = Callable[[pb.PredictionRequest], object]


def ids(request: pb.PredictionRequest) -> pb.SparseFeatures:
    return request.id_list_features


def moved(features: pb.SparseFeatures) -> pb.SparseFeatures:
    """Returns a copy of ``features``, and clears the original."""
    copy = pb.SparseFeatures()
    copy.CopyFrom(features)
    features.Clear()
    return copy


WRONG: dict[str, tuple[Change, str, str]] = {
    "no examples": (lambda one: one.ClearField("batch_size"), "batch_size", "is 0"),
    "fewer than none": (lambda one: setattr(one, "batch_size", -3), "batch_size", "is -3"),
    "other examples": (
        lambda one: setattr(one, "batch_size", 2),
        "id_list_features.lengths",
        "has 36 bytes, not 24",
    ),
    "a feature less": (
        lambda one: ids(one).CopyFrom(sparse([BAGS["user"], BAGS["tag"]])),
        "num_features",
        "is 2: model 'shop' has 3 features, which are taken in its order: user, movie, tag",
    ),
    "a feature more": (
        lambda one: one.id_score_list_features.CopyFrom(weighted([[[], [], []]], [[[], [], []]])),
        "num_features",
        "is 4: model 'shop' has 3",
    ),
    "no features": (
        lambda one: one.ClearField("id_list_features"),
        "id_list_features.num_features",
        "are 0",
    ),
    "features of none": (
        lambda one: setattr(ids(one), "num_features", 0),
        "id_list_features.lengths",
        "has 36 bytes, not 0",
    ),
    "negative features": (
        lambda one: setattr(ids(one), "num_features", -1),
        "id_list_features.num_features",
        "is -1",
    ),
    "a length that is odd": (
        lambda one: setattr(ids(one), "lengths", ids(one).lengths + b"\0"),
        "id_list_features.lengths",
        "has 37 bytes, not 36: int32 for each of 3 features and 3 examples",
    ),
    "a negative length": (
        lambda one: setattr(ids(one), "lengths", b"\xff" * 4 + ids(one).lengths[4:]),
        "id_list_features.lengths",
        "has -1 at 0",
    ),
    "lengths that do not add up": (
        lambda one: setattr(ids(one), "lengths", b"\7\0\0\0" + ids(one).lengths[4:]),
        "id_list_features.values",
        "has 56 bytes, but the lengths add up to 13 ids, which take 104 as int64, 52 as int32",
    ),
    "an id that is odd": (
        lambda one: setattr(ids(one), "values", ids(one).values[:-1]),
        "id_list_features.values",
        "has 55 bytes, but the lengths add up to 7 ids, which take 56 as int64, 28 as int32",
    ),
    "weights where none are": (
        lambda one: setattr(ids(one), "weights", bytes(28)),
        "id_list_features.weights",
        "has 28 bytes: weighted ids are id_score_list_features",
    ),
    "no weights where some are": (
        lambda one: one.MergeFrom(pb.PredictionRequest(id_score_list_features=moved(ids(one)))),
        "id_score_list_features.weights",
        "has 0 bytes, not 28: float32 for each of 7 ids",
    ),
    "unary features": (
        lambda one: setattr(one.unary_features, "num_features", 5),
        "unary_features.num_features",
        "is 5",
    ),
    "an id without a row": (
        lambda one: setattr(ids(one), "values", bytes(48) + b"\7" + bytes(7)),
        "features.tag[1][1]",
        "is 7",
    ),
}


@pytest.mark.parametrize("name", WRONG)
async def test_error_names_field_and_sizes(live: Live, name: str) -> None:
    change, field, expected_error = WRONG[name]
    request = prediction_request(KEYS, BAGS)
    change(request)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await PredictorStub(live.channel).Predict(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert expected_error in str(caught.value.details())
    assert dict(caught.value.trailing_metadata() or ())["embedserve-field"] == field
    right = await PredictorStub(live.channel).Predict(prediction_request(KEYS, BAGS))
    assert np.array_equal(predicted(right, KEYS, 3), await embedded(live, {"features": BAGS}))
    assert live.outcomes("grpc") == {"INVALID_ARGUMENT": 1, "OK": 1}


@pytest.mark.parametrize(
    ("body", "expected_error"),
    [
        (b"\x1a\xff\xff\xff\xff\x0f", "it ends within a field"),
        (b"\x1a\x05\x12\x7f", "it ends within a field"),
        (b"\x0b", "ends within a field"),
    ],
)
async def test_malformed_predictor_message_is_rejected(
    live: Live, body: bytes, expected_error: str
) -> None:
    call = live.channel.unary_unary("/predictor.Predictor/Predict")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(body)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert expected_error in str(caught.value.details())


async def test_excessive_field_count_is_rejected_early(live: Live) -> None:
    call = live.channel.unary_unary("/predictor.Predictor/Predict")
    for body in (b"\x08\1" * 1_000_000, b"\x1a\x82\1" + b"\x08\1" * 65):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(body)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "over 64 fields" in str(caught.value.details())


async def test_reflection_lists_the_predictor(live: Live) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(live.channel)
    reflection_request = reflection_pb2.ServerReflectionRequest
    requests = [
        reflection_request(list_services=""),
        reflection_request(file_containing_symbol="predictor.Predictor"),
    ]
    listed, described = [one async for one in stub.ServerReflectionInfo(iter(requests))]
    names = [one.name for one in listed.list_services_response.service]
    assert "predictor.Predictor" in names
    assert described.file_descriptor_response.file_descriptor_proto
