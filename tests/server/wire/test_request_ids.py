"""Tests of request ids over every protocol: responses repeat them, and every error has one."""

import re

import grpc
import pytest
from server.http2_client import http2_client
from server.live import Live

ID = "x-request-id"
MADE = re.compile("[0-9a-f]{32}")


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", "/nowhere", {}),
        ("GET", "/models/nobody", {}),
        ("GET", "/v2/models/nobody", {}),
        ("PUT", "/embed", {}),
        ("POST", "/embed", {"Content-Encoding": "gzip"}),
        ("POST", "/embed", {"X-Much": "x" * 16_300}),
    ],
)
async def test_every_http_rejection_has_a_request_id(
    live: Live, method: str, path: str, headers: dict[str, str]
) -> None:
    for ours in ({}, {ID: "mine"}):
        response = await live.http.request(method, path, headers=headers | ours)
        assert response.status_code >= 400
        assert response.headers[ID] == "mine" if ours else MADE.fullmatch(response.headers[ID])
        async with http2_client(live.http_port) as client:
            lower = {name.lower(): value for name, value in (headers | ours).items()}
            over_http2 = await client.request(method, path, b"{", lower)
        assert over_http2.status == response.status_code
        assert over_http2.headers[ID] == "mine" if ours else MADE.fullmatch(over_http2.headers[ID])


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("/embedserve.v1.EmbeddingService/Nothing", b""),
        ("/embedserve.v1.EmbeddingService/GetModel", b"\x0a\x06nobody"),
        ("/embedserve.v1.EmbeddingService/Embed", b"\xff"),
        ("/embedserve.v1.EmbeddingService/EmbedStream", b"x" * 2000),
        ("/grpc.health.v1.Health/Check", b"\x0a\x06nobody"),
    ],
)
async def test_every_grpc_rejection_has_a_request_id(
    live: Live, method: str, message: bytes
) -> None:
    for ours in ([], [(ID, "mine")]):
        call = live.channel.unary_unary(method)(message, metadata=ours)
        assert await call.code() != grpc.StatusCode.OK
        request_id = dict(await call.trailing_metadata())[ID]
        assert request_id == "mine" if ours else MADE.fullmatch(request_id)
