"""Tests of float16 on request, over REST and gRPC: the rounded float32 result in half the bytes."""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from server.fake_engine import Bags, FakeEngine
from server.fake_models import unpooled_info
from server.live import PROTOBUF, Live, live_server

from embedserve_proto import embedding_pb2 as pb

BAGS: Bags = {"tag": [[1], [2, 3], []], "user": [[4], [], [6]]}
IDS: dict[str, Any] = {"ids": [1, 2, 3, 4, 6], "lengths": [1, 2, 0, 1, 0, 1]}
FLOAT32_REQUEST = pb.EmbedRequest(keys=["tag", "user"], **IDS)
FLOAT16_REQUEST = pb.EmbedRequest(keys=["tag", "user"], output_dtype=pb.FLOAT16, **IDS)
UNKNOWN: Any = 7
INVALID_REQUEST = pb.EmbedRequest(keys=["tag", "user"], output_dtype=UNKNOWN, **IDS)
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
def float16_values(engine: FakeEngine) -> np.ndarray:
    """Returns the expected result of BAGS."""
    with np.errstate(over="ignore"):
        expected = engine.expected(BAGS).astype(np.float16)
    assert np.isinf(expected).sum() == 2
    return expected


def check_float16(response: pb.EmbedResponse, float16_values: np.ndarray) -> None:
    assert response.output_dtype == pb.FLOAT16
    assert response.values == float16_values.astype("<f2").tobytes()


def check_float32(response: pb.EmbedResponse, engine: FakeEngine) -> None:
    assert response.output_dtype == pb.FLOAT32
    assert response.values == engine.expected(BAGS).astype("<f4").tobytes()


async def test_json_request_can_get_a_float16_protobuf_response(
    live: Live, float16_values: np.ndarray
) -> None:
    response = await live.http.post(
        "/embed",
        json={"features": BAGS, "output_dtype": "float16"},
        headers={"accept": PROTOBUF},
    )
    check_float16(pb.EmbedResponse.FromString(response.content), float16_values)


async def test_each_request_of_a_stream_has_its_own_dtype(
    live: Live, engine: FakeEngine, float16_values: np.ndarray
) -> None:
    """Covers requests that share a batch."""
    requests = [FLOAT16_REQUEST, FLOAT32_REQUEST, INVALID_REQUEST, FLOAT16_REQUEST]
    responses = [response async for response in live.stub.EmbedStream(iter(requests))]
    check_float16(responses[0], float16_values)
    check_float32(responses[1], engine)
    error = pb.Error(code="INVALID_ARGUMENT", message=PROBLEM, field="output_dtype")
    assert responses[2] == pb.EmbedResponse(error=error)
    check_float16(responses[3], float16_values)


async def test_explicit_float32_yields_the_default_json_response(live: Live) -> None:
    named = await live.http.post("/embed", json={"features": BAGS, "output_dtype": "float32"})
    plain = await live.http.post("/embed", json={"features": BAGS})
    assert named.content == plain.content
    assert "output_dtype" not in plain.json()
