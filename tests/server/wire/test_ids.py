"""Tests of raw ids, strings, unknown ids and rows with the clients of REST and gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import numpy as np
import pytest
from server.fake_engine import Bags, FakeEngine
from server.fake_models import ruled_info, unpooled_info
from server.live import Live, live_server
from server.openapi import validate
from server.waiting import WAIT_S_MAX

from embedserve_client import (
    AsyncEmbedClient,
    AsyncGrpcEmbedClient,
    EmbedResult,
    StreamRequest,
)

RULED = FakeEngine(ruled_info())
UNPOOLED = FakeEngine(unpooled_info())

RULED_BAGS: Bags = {
    "tag": [["comédie", "war", "映画"], []],
    "user": [[-(2**63), 2**63 - 1, 12], [13, 14]],
    "movie": [[1], [99, -1]],
    "day": [[-(2**63), -1], [2**63 - 1]],
    "shelf": [[], [300]],
}
RULED_UNKNOWN = {"tag": 1, "user": 3, "movie": 2}
UNPOOLED_BAGS: Bags = {"last": [[0], [8, 8]], "tag": [["drama", "war"], []], "item": [[9, 3], []]}
UNPOOLED_UNKNOWN = {"tag": 1, "item": 1}
CASES = [(RULED, RULED_BAGS, RULED_UNKNOWN), (UNPOOLED, UNPOOLED_BAGS, UNPOOLED_UNKNOWN)]


@pytest.fixture
async def live() -> AsyncIterator[Live]:
    async with live_server(RULED, UNPOOLED) as live:
        yield live


@pytest.mark.parametrize(("engine", "bags", "unknown"), CASES)
async def test_every_client_reads_string_id_results(
    live: Live, engine: FakeEngine, bags: Bags, unknown: dict[str, int]
) -> None:
    name = engine.model.name
    rest = AsyncEmbedClient(f"http://127.0.0.1:{live.http_port}", timeout_s=WAIT_S_MAX)
    grpc = AsyncGrpcEmbedClient(live.grpc_target, timeout_s=WAIT_S_MAX)
    async with rest, grpc:
        results = [await rest.embed(bags, model=name), await grpc.embed(bags, model=name)]
        items = [StreamRequest(bags, model=name)] * 2
        results += [response.result() async for response in grpc.embed_stream(items)]
        assert [await client.model(name) for client in (rest, grpc)] == [await rest.model(name)] * 2
    assert len(results) == 4
    for result in results:
        check(result, engine, bags, unknown)


def check(result: EmbedResult, engine: FakeEngine, bags: Bags, unknown: dict[str, int]) -> None:
    assert np.array_equal(result.values, engine.expected(bags))
    assert result.unknown_ids == unknown
    assert result.is_pooled == engine.model.is_pooled
    if not result.is_pooled:
        lengths = [result[key].lengths.tolist() for key in result.keys]
        assert lengths == engine.expected_lengths(bags)
        assert [len(result[key].values) for key in result.keys] == [sum(row) for row in lengths]


async def test_openapi_describes_strings_unknown_ids_and_rows(live: Live) -> None:
    described = (await live.http.get("/openapi.json")).json()
    for path, bags in (("ruled", RULED_BAGS), ("sequence", UNPOOLED_BAGS)):
        request = {"features": bags}
        validate(request, "EmbedRequest", described)
        response: httpx.Response = await live.http.post(f"/models/{path}/embed", json=request)
        validate(response.json(), "EmbedResponse", described)
