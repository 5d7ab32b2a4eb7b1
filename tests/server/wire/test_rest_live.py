"""Tests of POST /embed on a loopback port: behaviour that needs a real connection."""

import asyncio
import json

import pytest
from server.fake_engine import Bags, FakeEngine
from server.fake_models import ruled_info, unpooled_info
from server.live import Live, live_server
from server.openapi import validate
from server.waiting import until

from embedserve.config import Limits

BAGS: Bags = {"user": [[1, 2]]}
BODY = json.dumps({"features": BAGS}).encode()
LIMITS = Limits(body_bytes_max=100_000, request_text_bytes_max=80_000, inline_bytes_max=0)
HEAD = b"POST /embed HTTP/1.1\r\nHost: test\r\n"
SENT = HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_other_methods_keep_the_connection_usable(live: Live, method: str) -> None:
    for _ in range(2):
        response = await live.http.request(method, "/embed")
        assert (response.status_code, response.headers["allow"]) == (405, "POST")
        assert (response.content == b"") == (method == "HEAD")
    assert (await live.http.post("/embed", content=BODY)).status_code == 200


@pytest.mark.parametrize("path", ["/", "/console", "/health/ready", "/models/shop", "/v2", "/docs"])
async def test_head_gets_the_headers_of_get(live: Live, path: str) -> None:
    headers = {"x-request-id": "same"}
    got, head = [await live.http.request(one, path, headers=headers) for one in ("GET", "HEAD")]
    for one in (got, head):
        del one.headers["date"]  # which changes with time
    assert (head.status_code, head.headers, head.content) == (200, got.headers, b"")
    assert got.content


NAMED_IDS: dict[str, Bags] = {
    "ruled": {
        "tag": [["comédie", "war", "映画"], []],
        "user": [[-(2**63), 2**63 - 1, 12], [13, 14]],
        "movie": [[1], [99, -1]],
        "day": [[-(2**63), -1], [2**63 - 1]],
        "shelf": [[], [300]],
    },
    "sequence": {"last": [[0], [8, 8]], "tag": [["drama", "war"], []], "item": [[9, 3], []]},
}
"""Ids of each model; some are unknown."""


async def test_openapi_describes_strings_unknown_ids_and_rows() -> None:
    async with live_server(FakeEngine(ruled_info()), FakeEngine(unpooled_info())) as live:
        described = (await live.http.get("/openapi.json")).json()
        for model, bags in NAMED_IDS.items():
            request = {"features": bags}
            validate(request, "EmbedRequest", described)
            response = (await live.http.post(f"/models/{model}/embed", json=request)).json()
            assert response["unknown_ids"]
            validate(response, "EmbedResponse", described)


async def test_request_of_a_disconnected_client_is_not_looked_up(
    engine: FakeEngine,
) -> None:
    async with live_server(engine, limits=Limits(delay_ms_max=600_000)) as live:
        _, writer = await asyncio.open_connection("127.0.0.1", live.http_port)
        writer.write(SENT)
        await until(lambda: live.queued() == 1)
        writer.close()
        await until(lambda: live.outcomes("rest") == {"CANCELLED": 1})
        await until(lambda: live.queued() == 0)
    assert engine.lookups == []


async def test_health_and_metrics_respond_while_a_batch_runs(
    live: Live, engine: FakeEngine
) -> None:
    engine.hold()
    running = asyncio.create_task(live.http.post("/embed", content=BODY))
    await until(lambda: engine.lookups)
    assert (await live.http.get("/health/ready")).status_code == 200
    assert "embedserve_queue_requests" in (await live.http.get("/metrics")).text
    engine.release()
    await running
