"""Tests of float16 on request, over REST and gRPC: the rounded float32 result in half the bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from server.fake_engine import Bags, FakeEngine
from server.fake_models import unpooled_info
from server.live import PROTOBUF, Live, live_server
from server.openapi import validate

from embedserve_proto import embedding_pb2 as pb

BAGS: Bags = {"tag": [[1], [2, 3], []], "user": [[4], [], [6]]}
IDS: dict[str, Any] = {"ids": [1, 2, 3, 4, 6], "lengths": [1, 2, 0, 1, 0, 1]}
WHOLE = pb.EmbedRequest(keys=["tag", "user"], **IDS)
HALVES = pb.EmbedRequest(keys=["tag", "user"], output_dtype=pb.FLOAT16, **IDS)
UNKNOWN: Any = 7
WRONG = pb.EmbedRequest(keys=["tag", "user"], output_dtype=UNKNOWN, **IDS)
PROBLEM = "output_dtype is 7, expected FLOAT32 (0) or FLOAT16 (1)"


@pytest.fixture
def engine() -> FakeEngine:
    """Returns an engine whose row 6 of user has values just beyond and just within float16's
    range."""
    engine = FakeEngine()
    engine.tables["t_user"][6] = [1e5, -1e5, 65504, 1e-7]
    return engine


@pytest.fixture
async def live(engine: FakeEngine) -> AsyncIterator[Live]:
    async with live_server(engine, FakeEngine(unpooled_info())) as live:
        yield live


@pytest.fixture
def halves(engine: FakeEngine) -> np.ndarray:
    """Returns the expected result of BAGS."""
    with np.errstate(over="ignore"):
        expected = engine.expected(BAGS).astype(np.float16)
    assert np.isinf(expected).sum() == 2
    return expected


def check(answer: pb.EmbedResponse, halves: np.ndarray) -> None:
    assert answer.output_dtype == pb.FLOAT16
    assert answer.values == halves.astype("<f2").tobytes()


def check_whole(answer: pb.EmbedResponse, engine: FakeEngine) -> None:
    assert answer.output_dtype == pb.FLOAT32
    assert answer.values == engine.expected(BAGS).astype("<f4").tobytes()


async def test_json_may_ask_for_protobuf_in_float16(live: Live, halves: np.ndarray) -> None:
    answer = await live.http.post(
        "/embed",
        json={"features": BAGS, "output_dtype": "float16"},
        headers={"accept": PROTOBUF},
    )
    check(pb.EmbedResponse.FromString(answer.content), halves)


async def test_each_request_of_a_stream_says_its_dtype(
    live: Live, engine: FakeEngine, halves: np.ndarray
) -> None:
    """Covers requests that share a batch."""
    requests = [HALVES, WHOLE, WRONG, HALVES]
    answers = [answer async for answer in live.stub.EmbedStream(iter(requests))]
    check(answers[0], halves)
    check_whole(answers[1], engine)
    error = pb.Error(code="INVALID_ARGUMENT", message=PROBLEM, field="output_dtype")
    assert answers[2] == pb.EmbedResponse(error=error)
    check(answers[3], halves)


async def test_an_unknown_number_is_refused_with_field_and_value(live: Live) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await live.stub.Embed(WRONG)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == PROBLEM
    answer = await live.http.post(
        "/embed", content=WRONG.SerializeToString(), headers={"content-type": PROTOBUF}
    )
    assert (answer.status_code, error_of(answer)) == (400, PROBLEM)


async def test_json_answers_in_float16_and_says_so(live: Live, halves: np.ndarray) -> None:
    described = (await live.http.get("/openapi.json")).json()
    request = {"features": BAGS, "output_dtype": "float16"}
    validate(request, "EmbedRequest", described)
    answer = (await live.http.post("/embed", json=request)).json()
    validate(answer, "EmbedResponse", described)
    assert answer["output_dtype"] == "float16"
    read = np.array(answer["values"], np.float64).astype(np.float16)
    finite = np.isfinite(halves)
    assert np.array_equal(read[finite], halves[finite])
    assert answer["values"][2][:2] == [None, None]


async def test_json_that_names_float32_is_answered_as_if_it_named_nothing(live: Live) -> None:
    named = await live.http.post("/embed", json={"features": BAGS, "output_dtype": "float32"})
    plain = await live.http.post("/embed", json={"features": BAGS})
    assert named.content == plain.content
    assert "output_dtype" not in plain.json()


async def test_another_name_is_refused_with_field_and_value(live: Live) -> None:
    answer = await live.http.post("/embed", json={"features": BAGS, "output_dtype": "int8"})
    problem = 'output_dtype is "int8", expected "float32" or "float16"'
    assert (answer.status_code, error_of(answer)) == (400, problem)


def error_of(answer: httpx.Response) -> str:
    error: dict[str, str] = answer.json()["error"]
    assert error["field"] == "output_dtype"
    return error["message"]
