"""Sends one request over each protocol, and reads what its answer and the log tell."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import grpc
import pytest
from server.http2_client import http2_client
from server.live import GRPC_SERVERS, Live

from embedserve_proto import embedding_pb2 as pb

REQUEST = pb.EmbedRequest(keys=["user"], ids=[1], lengths=[1])
WRONG = pb.EmbedRequest(keys=["user"], ids=[7], lengths=[1])
WAYS = ("http1", "uvicorn", "http2", "native", "grpcio", "stream")


class Told(NamedTuple):
    """Of an answer: whether it is one, and what its headers or trailers tell."""

    is_ok: bool
    headers: dict[str, str]


class Way:
    """How a live server is asked."""

    def __init__(self, name: str, live: Live) -> None:
        self.name = name
        self.live = live

    async def ask(self, is_wrong: bool = False, **headers: str) -> Told:
        """For one row that there is, or for one that there is not."""
        named = [(name.replace("_", "-"), value) for name, value in headers.items()]
        if self.name in GRPC_SERVERS:
            return await self._by_grpc(WRONG if is_wrong else REQUEST, named)
        if self.name == "stream":
            return await self._by_stream(WRONG if is_wrong else REQUEST, named)
        body = json.dumps({"features": {"user": [[7 if is_wrong else 1]]}}).encode()
        if self.name == "http2":
            return await self._by_http2(body, dict(named))

        async def in_pieces() -> AsyncIterator[bytes]:
            yield body

        content: Any = in_pieces() if self.name == "uvicorn" else body
        answer = await self.live.http.post("/embed", content=content, headers=named)
        return Told(answer.status_code == 200, dict(answer.headers))

    async def _by_http2(self, body: bytes, headers: dict[str, str]) -> Told:
        async with http2_client(self.live.http_port) as client:
            answer = await client.request("POST", "/embed", body, headers)
        return Told(answer.status == 200, answer.headers)

    async def _by_grpc(self, request: pb.EmbedRequest, metadata: list[tuple[str, str]]) -> Told:
        call = self.live.stub.Embed(request, metadata=metadata)
        is_ok = await call.code() == grpc.StatusCode.OK
        return Told(is_ok, dict(await call.trailing_metadata()))

    async def _by_stream(self, request: pb.EmbedRequest, metadata: list[tuple[str, str]]) -> Told:
        call = self.live.stub.EmbedStream(iter([request]), metadata=metadata)
        (answer,) = [answer async for answer in call]
        return Told(not answer.HasField("error"), dict(await call.trailing_metadata()))


def fields_of(caplog: pytest.LogCaptureFixture, message: str) -> list[dict[str, Any]]:
    return [
        vars(record)["fields"] for record in caplog.records if record.message.startswith(message)
    ]
