"""REST: POST /embed and POST /models/{model}/embed as a bare ASGI endpoint.

These two are answered before FastAPI's middleware and router see them, which cost more than a
lookup. Every other request goes to the management application (management.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from time import perf_counter
from typing import Any, NamedTuple

from embedserve.codec import json_codec, protobuf_codec
from embedserve.errors import (
    INTERNAL,
    EmbedServeError,
    EngineError,
    InvalidRequestError,
    RequestTooLargeError,
)
from embedserve.models.models import Service
from embedserve.types import LookupRequest, LookupResult

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON = b"application/json"
PROTOBUF = b"application/x-protobuf"


class MethodNotAllowedError(EmbedServeError):
    code = "INVALID_ARGUMENT"
    http_status = 405


class UnsupportedEncodingError(EmbedServeError):
    code = "INVALID_ARGUMENT"
    http_status = 415


class ClientGoneError(Exception):
    """The client closed its connection; nobody is there to be answered."""


class Call(NamedTuple):
    """What the headers ask for."""

    body_is_protobuf: bool
    answer_is_protobuf: bool
    timeout_s: float | None


class EmbedEndpoint:
    """The ASGI application: the embed routes itself, everything else through ``management``."""

    def __init__(self, service: Service, management: ASGIApp) -> None:
        self._service = service
        self._management = management
        self._metrics = service.metrics.protocols["rest"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        model = embed_route(scope["path"]) if scope["type"] == "http" else None
        if model is None:
            return await self._management(scope, receive, send)
        return await self._embed(model, scope, receive, send)

    async def _embed(self, model: str, scope: Scope, receive: Receive, send: Send) -> None:
        start = perf_counter()
        try:
            answer, content_type = await self._answer(model, scope, receive)
        except EmbedServeError as error:
            self._metrics.failed(error.code, perf_counter() - start)
            await send_error(send, error)
        except ClientGoneError:
            self._metrics.failed("CANCELLED", perf_counter() - start)
        except Exception:
            logger.exception("POST %s failed", scope["path"])
            self._metrics.failed(EngineError.code, perf_counter() - start)
            await send_error(send, EngineError(INTERNAL))
        else:
            self._metrics.answered(perf_counter() - start, len(answer))
            await send_answer(send, 200, answer, content_type)

    async def _answer(self, model: str, scope: Scope, receive: Receive) -> tuple[bytes, bytes]:
        if scope["method"] != "POST":
            raise MethodNotAllowedError(f"method is {scope['method']}: send a POST")
        call = read_headers(scope["headers"])
        body = await self._read_body(scope["headers"], receive)
        self._service.check_open(model)
        request: LookupRequest
        if call.body_is_protobuf:
            request = protobuf_codec.decode_request(body, model)
        else:
            request = json_codec.decode_request(body, model)
        result = await self._result(request, call.timeout_s, receive)
        if call.answer_is_protobuf:
            return protobuf_codec.encode_result(result), PROTOBUF
        return json_codec.encode_result(result), JSON

    async def _read_body(self, headers: Headers, receive: Receive) -> bytes:
        limit = self._service.limits.body_bytes_max
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            chunk: bytes = message.get("body", b"")
            size += len(chunk)
            if size > limit:
                raise RequestTooLargeError(
                    f"body has {_size_said(headers, size)} bytes, the limit is {limit}", "body"
                )
            if not message.get("more_body", False):
                return b"".join([*chunks, chunk]) if chunks else chunk
            chunks.append(chunk)

    async def _result(
        self, request: LookupRequest, timeout_s: float | None, receive: Receive
    ) -> LookupResult:
        """Waits for the answer; where that takes a while, also for the client to go away.

        A batch that runs inline answers within the event loop's next turn: too soon to watch
        for a disconnect. Any longer, and a client that goes away leaves the queue.
        """
        answer = self._service.submit(request, timeout_s)
        await asyncio.sleep(0)
        if answer.done():
            return answer.result()
        gone = asyncio.ensure_future(receive())
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            raise ClientGoneError
        finally:
            answer.cancel()
            gone.cancel()


def embed_route(path: str) -> str | None:
    """The model of an embed route's ``path``, "" for the default one; None for other routes."""
    if path == "/embed":
        return ""
    if path.endswith("/embed") and path.startswith("/models/"):
        model = path[len("/models/") : -len("/embed")]
        if model and "/" not in model:
            return model
    return None


def read_headers(headers: Headers) -> Call:
    """The Call that ``headers`` (names in lower case) ask for.

    JSON unless the content type is protobuf; answered in the format of Accept, or else of the
    request. X-Timeout-Ms is how long the caller waits for the answer.

    Raises:
        InvalidRequestError: X-Timeout-Ms is not a positive number.
        UnsupportedEncodingError: the body is compressed.
    """
    content_type = accept = b""
    timeout_s = None
    for name, value in headers:
        if name == b"content-type":
            content_type = value.lower()
        elif name == b"accept":
            accept = value.lower()
        elif name == b"x-timeout-ms":
            timeout_s = _timeout_s(value)
        elif name == b"content-encoding" and value != b"identity":
            raise UnsupportedEncodingError(
                f"Content-Encoding is {value.decode('latin-1')!r}: send the body as it is",
                "Content-Encoding",
            )
    body_is_protobuf = content_type.startswith(PROTOBUF)
    answer_is_protobuf = PROTOBUF in accept or (body_is_protobuf and JSON not in accept)
    return Call(body_is_protobuf, answer_is_protobuf, timeout_s)


def _timeout_s(value: bytes) -> float:
    try:
        timeout_ms = float(value)
    except ValueError:
        timeout_ms = -1.0
    if not 0 < timeout_ms < float("inf"):
        raise InvalidRequestError(
            f"X-Timeout-Ms is {value.decode('latin-1')!r}, expected milliseconds above 0",
            "X-Timeout-Ms",
        )
    return timeout_ms / 1000


def _size_said(headers: Headers, size_seen: int) -> str:
    """A body's size as its Content-Length says, or else that it is ``size_seen`` or more."""
    said = dict(headers).get(b"content-length", b"")
    return said.decode() if said.isdigit() else f"at least {size_seen}"


async def send_answer(
    send: Send, status: int, body: bytes, content_type: bytes, *extra: tuple[bytes, bytes]
) -> None:
    headers = [
        (b"content-type", content_type),
        (b"content-length", b"%d" % len(body)),
        *extra,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: EmbedServeError) -> None:
    """``error`` in the JSON shape of every REST error."""
    extra = error_headers(error)
    await send_answer(send, error.http_status, json_codec.encode_error(error), JSON, *extra)


def error_headers(error: EmbedServeError) -> Headers:
    """Headers of an error's answer beside its content type and length."""
    headers = []
    if error.http_status == 405:
        headers.append((b"allow", b"POST"))
    if error.retry_after_s:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    return headers
