"""Tests of REST over HTTP/2 with prior knowledge, on both ports: responses as over HTTP/1."""

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

import pytest
from server.http2_client import Http2Client, http2_client
from server.live import PROTOBUF, Live

from embedserve.config import Limits
from embedserve_proto import embedding_pb2 as pb

BODY = b'{"features": {"user": [[1, 2]], "movie": [[3]]}}'
MESSAGE = pb.EmbedRequest(keys=["user"], ids=[1, 2], lengths=[2]).SerializeToString()
LIMITS = Limits(body_bytes_max=2_000_000, inline_bytes_max=0)


@pytest.fixture(params=["http", "grpc"])
async def client(live: Live, request: pytest.FixtureRequest) -> AsyncIterator[Http2Client]:
    grpc_port = int(live.grpc_target.rpartition(":")[2])
    async with http2_client(live.http_port if request.param == "http" else grpc_port) as client:
        yield client


CASES: dict[str, tuple[str, str, bytes, dict[str, str]]] = {
    "json": ("POST", "/embed", BODY, {}),
    "named model": ("POST", "/models/shop/embed", BODY, {}),
    "query": ("POST", "/embed?a=1", BODY, {}),
    "protobuf, answered as json": (
        "POST",
        "/embed",
        MESSAGE,
        {"content-type": PROTOBUF, "accept": "application/json"},
    ),
    "no row": ("POST", "/embed", b'{"features": {"user": [[99]]}}', {}),
    "unknown path": ("POST", "/nothing", BODY, {}),
    "other method": ("GET", "/embed", b"", {}),
    "models": ("GET", "/models", b"", {}),
    "one model": ("GET", "/models/shop", b"", {}),
    "ready": ("GET", "/health/ready", b"", {}),
    "openapi": ("GET", "/openapi.json", b"", {}),
    "headers of models": ("HEAD", "/models", b"", {}),
    "too large": ("POST", "/embed", b" " * 2_000_001, {}),
}


@pytest.mark.parametrize("name", CASES)
async def test_http2_response_equals_the_http1_response(
    live: Live, client: Http2Client, name: str
) -> None:
    method, path, body, headers = CASES[name]
    # httpx adds headers of its own, which affect only the format of the response.
    plain = {"accept": "*/*", "x-request-id": "same", **headers}
    over_http1 = await live.http.request(method, path, content=body, headers=plain)
    length = {"content-length": str(len(body))} if body else {}
    response = await client.request(method, path, body, {**plain, **length})
    assert (response.status, response.body, response.reset) == (
        over_http1.status_code,
        over_http1.content,
        None,
    )
    over_http1.headers.pop("connection", None)  # a rejection by headers ends the connection
    dates = {parsedate_to_datetime(one.headers.pop("date")) for one in (response, over_http1)}
    assert max(datetime.now(UTC) - date for date in dates) < timedelta(minutes=1)
    assert response.headers == over_http1.headers
    outcomes = live.outcomes("rest")
    assert all(count == 2 for count in outcomes.values()), outcomes


async def test_oversized_headers_are_rejected_with_431(live: Live, client: Http2Client) -> None:
    headers = {f"x-{i}": "a" * 1000 for i in range(17)}
    response = await client.request("POST", "/embed", BODY, headers)
    assert response.status == 431
    assert json.loads(response.body)["error"]["code"] == "RESOURCE_EXHAUSTED"
    assert live.outcomes("rest") == {"RESOURCE_EXHAUSTED": 1}
