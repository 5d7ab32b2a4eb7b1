"""ASGI server of the management application: a handler of one stream, over HTTP/1 and HTTP/2."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, MutableMapping
from time import perf_counter
from typing import Any
from urllib.parse import unquote

from embedserve.access.authenticator import CERTIFICATE, headers_by_name
from embedserve.access.client_address import PEER
from embedserve.errors import (
    INTERNAL,
    EmbedServeError,
    EngineError,
    OverloadedError,
    RequestTooLargeError,
)
from embedserve.metrics.rate_limited_logger import SHOWN_CHARACTERS_MAX
from embedserve.metrics.scrape_text import RECEIVED_S
from embedserve.pipeline import UPLOAD_S_MAX, late_request
from embedserve.tracing.request_id import REQUEST_ID, request_id_header
from embedserve.wire.http_stream import Handler, HttpRequest, HttpStream
from embedserve.wire.management_turns import ManagementTurns
from embedserve.wire.rest.calls import write_error
from embedserve.wire.rest.headers import error_encoder

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

MANAGEMENT_BODY_BYTES_MAX = 64 << 10
"""Bytes of the body of a management request; none needs a larger one."""


class ClientGoneError(Exception):
    """The client closed its connection, so no response is possible."""


class AsgiHandler(Handler):
    """Stream handler that runs the management application in a task, once the request is read and
    has its turn."""

    def __init__(
        self, app: ASGIApp, turns: ManagementTurns, request: HttpRequest, stream: HttpStream
    ) -> None:
        self._app = app
        self._turns = turns
        self._request = request
        self._stream = stream
        self._start_s = perf_counter()
        self._received_s = math.inf
        self._body: list[bytes] = []
        self._size = 0
        self._has_started = self._has_ended = False
        self._sent = asyncio.Event()  # set when the body written so far was sent
        self._gone = asyncio.Event()  # set once the client is gone
        self._task: asyncio.Task[None] | None = None
        if (request.content_length or 0) > MANAGEMENT_BODY_BYTES_MAX:
            self._reject_size(f"{request.content_length}")

    def receive(self, data: bytes, is_end: bool) -> None:
        self._size += len(data)
        if self._size > MANAGEMENT_BODY_BYTES_MAX:
            self._reject_size(f"at least {self._size}")
            return
        self._body.append(data)
        if is_end:
            self._received_s = perf_counter()
            try:
                self._turns.add(self._stream.connection, self._begin, self._size)
            except OverloadedError as error:
                self._reject(error)

    def _begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def _reject_size(self, size: str) -> None:
        problem = f"body has {size} bytes, the limit is {MANAGEMENT_BODY_BYTES_MAX}"
        self._reject(RequestTooLargeError(problem, "body"))

    def _reject(self, error: EmbedServeError) -> None:
        request = self._request
        headers = request_id_header(headers_by_name(request.headers).get(REQUEST_ID))
        write_error(self._stream, error, headers, request.method, error_encoder(request.target))

    async def _run(self) -> None:
        if self._gone.is_set():
            return
        scope = _scope(self._request, self._stream.http_version)
        scope[PEER] = self._stream.connection.peer
        scope[CERTIFICATE] = self._stream.connection.certificate
        scope[RECEIVED_S] = self._received_s
        try:
            await self._app(scope, self._receive, self._send)
        except ClientGoneError:
            return
        except Exception:
            path = self._request.target[:SHOWN_CHARACTERS_MAX].decode("latin-1")
            logger.exception("%s %a failed", scope["method"], path)
            if not self._has_started:
                self._reject(EngineError(INTERNAL))
                return
        if not self._has_ended:
            self._stream.abort()

    async def _receive(self) -> Message:
        if self._body:
            body = b"".join(self._body)
            self._body.clear()
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._gone.is_set():
            raise ClientGoneError
        if message["type"] == "http.response.start":
            self._has_started = True
            headers = [(name.lower(), value) for name, value in message.get("headers", ())]
            self._stream.start_response(message["status"], headers)
            return
        body = message.get("body", b"")
        if body and self._request.method != b"HEAD":
            self._sent.clear()
            self._stream.send_body((body,), len(body))
        if not message.get("more_body", False):
            self._has_ended = True
            self._stream.end()
        elif self._stream.unsent_bytes:
            await self._sent.wait()

    def reset(self) -> None:
        self._gone.set()
        self._sent.set()
        self._turns.withdraw(self._stream.connection, self._begin, self._size)

    def resume(self) -> None:
        self._sent.set()

    def check_time(self, now_s: float) -> None:
        if not self._stream.is_received and now_s - self._start_s > UPLOAD_S_MAX:
            self._reject(late_request())


def _scope(request: HttpRequest, http_version: str) -> Scope:
    path, _, query = request.target.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": http_version,
        # The application's routes know GET alone. AsgiHandler sends no body to HEAD.
        "method": "GET" if request.method == b"HEAD" else request.method.decode("latin-1"),
        "scheme": request.scheme.decode("latin-1"),
        "path": unquote(path.decode("latin-1")),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": request.headers,
        "server": None,
        "client": None,
        "state": {},
    }
