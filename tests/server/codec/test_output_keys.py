"""Some of the keys on request, over REST and gRPC: those of the whole answer, and no others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
from server.fake_engine import Bags, FakeEngine
from server.fake_models import model_info, unpooled_info
from server.live import PROTOBUF, Live, live_server
from server.openapi import validate

from embedserve.batching.split import select_output_keys
from embedserve.batching.validation import check_output
from embedserve.config import Limits
from embedserve.errors import InvalidRequestError
from embedserve.lookup import LookupResult, OutputOptions
from embedserve.model_info import PARTS_MAX
from embedserve_proto import embedding_pb2 as pb

BAGS: Bags = {"tag": [[1], [2, 3], []], "user": [[4], [], [6]]}
IDS: dict[str, Any] = {"ids": [1, 2, 3, 4, 6], "lengths": [1, 2, 0, 1, 0, 1]}
COLUMNS = {"user": slice(0, 4), "movie": slice(4, 7), "tag": slice(7, 9)}
SELECTIONS = [("user",), ("tag", "user"), ("movie", "tag"), ("movie", "user"), ("tag",)]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def live(engine: FakeEngine) -> AsyncIterator[Live]:
    limits = Limits(request_features_max=3)
    async with live_server(engine, FakeEngine(unpooled_info()), limits=limits) as live:
        yield live


def selected(engine: FakeEngine, keys: tuple[str, ...]) -> np.ndarray:
    whole = engine.expected(BAGS)
    return np.concatenate([whole[:, COLUMNS[key]] for key in COLUMNS if key in keys], axis=1)


@pytest.mark.parametrize("keys", SELECTIONS, ids=" ".join)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
async def test_the_answer_has_those_keys_alone_in_the_models_order(
    live: Live, engine: FakeEngine, keys: tuple[str, ...], dtype: str
) -> None:
    output_dtype = pb.FLOAT16 if dtype == "float16" else pb.FLOAT32
    request = pb.EmbedRequest(
        keys=["tag", "user"], output_keys=keys, output_dtype=output_dtype, **IDS
    )
    expected = selected(engine, keys).astype(dtype)
    answer = await live.stub.Embed(request)
    assert list(answer.keys) == [key for key in COLUMNS if key in keys]
    assert answer.values == expected.tobytes()
    assert sum(answer.length_per_key) == expected.shape[1]
    over_rest = await live.http.post(
        "/embed", content=request.SerializeToString(), headers={"content-type": PROTOBUF}
    )
    assert pb.EmbedResponse.FromString(over_rest.content) == answer
    as_json = {"features": BAGS, "output_keys": list(keys), "output_dtype": dtype}
    described = (await live.http.get("/openapi.json")).json()
    validate(as_json, "EmbedRequest", described)
    read = (await live.http.post("/embed", json=as_json)).json()
    validate(read, "EmbedResponse", described)
    assert (read["keys"], read["length_per_key"]) == (
        list(answer.keys),
        list(answer.length_per_key),
    )
    assert np.array_equal(np.array(read["values"]).astype(dtype), expected)


@pytest.mark.parametrize("keys", [(), ("tag", "movie", "user")])
async def test_all_keys_or_none_give_the_plain_answer(live: Live, keys: tuple[str, ...]) -> None:
    plain = await live.stub.Embed(pb.EmbedRequest(keys=["tag", "user"], **IDS))
    named = await live.stub.Embed(pb.EmbedRequest(keys=["tag", "user"], output_keys=keys, **IDS))
    assert named == plain
    json_plain = await live.http.post("/embed", json={"features": BAGS})
    json_named = await live.http.post("/embed", json={"features": BAGS, "output_keys": keys})
    assert json_named.content == json_plain.content


async def test_each_request_of_a_batch_has_its_own(live: Live, engine: FakeEngine) -> None:
    asked = [("user",), (), ("tag",), ("user",)]
    requests = [pb.EmbedRequest(keys=["tag", "user"], output_keys=keys, **IDS) for keys in asked]
    answers = [answer async for answer in live.stub.EmbedStream(iter(requests))]
    for keys, answer in zip(asked, answers, strict=True):
        assert answer.values == selected(engine, keys or tuple(COLUMNS)).tobytes()


@pytest.mark.parametrize("keys", SELECTIONS, ids=" ".join)
def test_an_answer_in_pieces_stays_in_pieces(engine: FakeEngine, keys: tuple[str, ...]) -> None:
    whole = engine.expected(BAGS)
    result = LookupResult(engine.model, whole[:1], extra_chunks=[whole[1:2], whole[2:]])
    select_output_keys(result, OutputOptions(keys))
    pieces = [result.values, *result.extra_chunks]
    assert [len(piece) for piece in pieces] == [1, 1, 1]
    assert np.array_equal(np.concatenate(pieces), selected(engine, keys))


WRONG = [
    (["user", "film"], "output_keys[1]", "output_keys[1] is 'film': model 'shop' has no such key"),
    (["user", "user"], "output_keys", "output_keys names 'user' twice"),
]


@pytest.mark.parametrize(("keys", "field", "said"), WRONG)
async def test_a_wrong_key_is_refused_with_what_there_is(
    live: Live, keys: list[str], field: str, said: str
) -> None:
    answer = await live.http.post("/embed", json={"features": BAGS, "output_keys": keys})
    error = answer.json()["error"]
    assert (answer.status_code, error["field"]) == (400, field)
    assert error["message"].startswith(said)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await live.stub.Embed(pb.EmbedRequest(keys=["tag", "user"], output_keys=keys, **IDS))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == error["message"]


async def test_more_keys_than_features_may_be_named_are_refused(live: Live) -> None:
    keys = ["user"] * 4
    answer = await live.http.post("/embed", json={"features": BAGS, "output_keys": keys})
    assert answer.status_code == 413
    assert answer.json()["error"]["field"] == "output_keys"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await live.stub.Embed(pb.EmbedRequest(keys=["tag", "user"], output_keys=keys, **IDS))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("value", "field", "said"),
    [
        ('"user"', "output_keys", 'is "user": expected a list of keys'),
        ('["user", 7]', "output_keys[1]", "is 7: expected a key"),
        ('["\\ud800"]', "output_keys[0]", "half of a surrogate pair"),
    ],
)
async def test_what_is_no_list_of_keys_is_refused(
    live: Live, value: str, field: str, said: str
) -> None:
    body = '{"features": {"user": [1]}, "output_keys": %s}' % value  # noqa: UP031
    answer = await live.http.post("/embed", content=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["field"]) == (400, field)
    assert said in error["message"]


def test_few_selections_are_remembered() -> None:
    """Whoever asks for another one each time fills no memory."""
    model = model_info(features={f"f{i}": (2, 1) for i in range(3 * PARTS_MAX)})
    first = model.with_keys(("f1", "f0"))
    assert model.with_keys(("f1", "f0")) is first
    assert first.keys == ("f0", "f1")
    for key in model.keys:
        assert check_output(OutputOptions((key,)), model).keys == (key,)
        model.with_keys((key,))
    assert len(model.key_selections) <= PARTS_MAX
    with pytest.raises(InvalidRequestError, match=r"output_keys\[0\] is 'f99'"):
        check_output(OutputOptions(("f99",)), model)
