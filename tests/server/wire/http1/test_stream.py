"""Tests of management responses over HTTP/1: how their bodies end, and backpressure."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from server.raw_http import OurServer, get, read_response
from server.waiting import until

from embedserve.pipeline import RequestPipeline
from embedserve.wire.asgi import Receive, Scope, Send

CHUNK = bytes(100_000)


class StreamingApp:
    """An ASGI application that responds with the number of chunks in its path: /3 with three.

    Attributes:
        sent: chunks that it could send.
        has_failed: whether sending failed because the client had closed.
    """

    def __init__(self) -> None:
        self.sent = 0
        self.has_failed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        count = int(scope["path"].strip("/"))
        headers = scope["query_string"] == b"length" and [
            (b"Content-Length", b"%d" % (count * len(CHUNK)))
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers or []})
        try:
            for _ in range(count):
                await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
                self.sent += 1
            if scope["query_string"] == b"raise":
                raise ValueError("broken")
            await send({"type": "http.response.body"})
        except BaseException:
            self.has_failed = True
            raise


@pytest.fixture
def app() -> StreamingApp:
    return StreamingApp()


@pytest.fixture
async def server(pipeline: RequestPipeline, app: StreamingApp) -> AsyncIterator[OurServer]:
    async with OurServer(pipeline, management=app) as server:
        yield server


async def read_headers(reader: asyncio.StreamReader) -> list[bytes]:
    """Returns the lines of a head, without its Date, which changes with time."""
    lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    return [line for line in lines if not line.startswith(b"date: ")]


async def read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += await reader.readexactly(size)
        assert await reader.readexactly(2) == b"\r\n"
    assert await reader.readexactly(2) == b"\r\n"
    return body


async def test_body_of_unknown_length_is_sent_chunked(server: OurServer) -> None:
    reader, writer = await server.open()
    for count in (2, 0, 1):
        writer.write(get(f"/{count}"))
        assert await read_headers(reader) == [b"HTTP/1.1 200 OK", b"transfer-encoding: chunked"]
        assert await read_chunks(reader) == count * CHUNK


async def test_content_length_of_the_application_is_kept(server: OurServer) -> None:
    reader, _ = await server.open(get("/2?length") * 2)
    for _ in range(2):
        status, headers, body = await read_response(reader)
        assert (status, list(headers), body) == (200, [b"content-length"], 2 * CHUNK)


async def test_http_1_0_response_is_not_chunked(server: OurServer) -> None:
    reader, _ = await server.open(get("/2").replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert await read_headers(reader) == [b"HTTP/1.1 200 OK", b"connection: close"]
    assert await reader.read() == 2 * CHUNK


@pytest.mark.parametrize("query", ["", "?length"])
async def test_response_to_a_head_request_has_no_body(server: OurServer, query: str) -> None:
    reader, _ = await server.open(get(f"/2{query}").replace(b"GET", b"HEAD") + get("/1"))
    header_lines = await read_headers(reader)
    assert header_lines[1:] == ([b"content-length: %d" % (2 * len(CHUNK))] if query else [])
    await read_headers(reader)
    assert await read_chunks(reader) == CHUNK


async def test_error_response_to_a_head_request_has_no_body(server: OurServer) -> None:
    reader, _ = await server.open(get("/none").replace(b"GET", b"HEAD") + get("/1"))
    status_line, *lines = await read_headers(reader)
    assert status_line == b"HTTP/1.1 500 Internal Server Error"
    assert int(dict(line.split(b": ") for line in lines)[b"content-length"]) > 0
    assert await read_headers(reader) == [b"HTTP/1.1 200 OK", b"transfer-encoding: chunked"]
    assert await read_chunks(reader) == CHUNK


async def test_application_error_within_a_body_closes_the_connection(
    server: OurServer, caplog: pytest.LogCaptureFixture
) -> None:
    reader, _ = await server.open(get("/1?raise"))
    await read_headers(reader)
    assert not (await reader.read()).endswith(b"0\r\n\r\n")  # the client sees that it is incomplete
    assert "GET '/1?raise' failed" in caplog.text


async def test_application_waits_for_a_slow_reader(server: OurServer, app: StreamingApp) -> None:
    reader, _ = await server.open(get("/40"))
    await until(lambda: server.http1() and server.connection.is_write_paused)
    assert app.sent < 20
    await read_headers(reader)
    assert await read_chunks(reader) == 40 * CHUNK
    assert app.sent == 40


async def test_application_send_fails_after_the_client_disconnects(
    server: OurServer, app: StreamingApp
) -> None:
    _, writer = await server.open(get("/40"))
    await until(lambda: server.http1() and server.connection.is_write_paused)
    writer.transport.abort()
    await until(lambda: app.has_failed)
    assert app.sent < 40


async def test_pipelined_responses_wait_for_a_slow_reader(
    server: OurServer, app: StreamingApp
) -> None:
    """Sends requests in one packet: they are parsed together, and their responses come in turn."""
    reader, _ = await server.open(get("/1?length") * 40)
    await until(lambda: server.http1() and server.connection.is_write_paused)
    assert app.sent < 20
    for _ in range(40):
        assert (await read_response(reader))[2] == CHUNK
