"""Tests of draining HTTP/1 connections: requests in flight, last responses, and slow readers."""

import asyncio
import json
import socket

import pytest
from server.fake_engine import FakeEngine
from server.live import IN_THREAD
from server.raw_http import OurServer, chunked, get, post, read_response
from server.waiting import WAIT_S_MAX, until
from server.wire.http1.sample_requests import BODY, LARGE_BODY, MISSING_ROW_BODY

from embedserve.wire import connections
from embedserve.wire.connections import DRAIN_IDLE_S
from embedserve.wire.http1 import connection as http1_connection

LIMITS = IN_THREAD

SHORT_IDLE_S = 0.05
"""Replaces DRAIN_IDLE_S in a test that waits for longer than that."""


@pytest.mark.parametrize("sent", [b"", post(BODY)[:30]])
async def test_drain_closes_a_connection_without_a_complete_request(
    server: OurServer, sent: bytes
) -> None:
    reader, writer = await server.open(post(BODY))
    await read_response(reader)
    writer.write(sent)
    await until(lambda: bool(sent) == server.connection.is_busy())
    server.connection.drain()
    assert await reader.read() == b""


@pytest.mark.parametrize("before", [[], [post(BODY)], [get("/health/live")]])
@pytest.mark.parametrize("request_sent", [post(BODY), get("/health/live"), chunked(BODY)])
async def test_request_sent_during_a_drain_is_answered_with_connection_close(
    server: OurServer,
    before: list[bytes],
    request_sent: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checks a request on a kept-alive connection, whose client cannot know of the drain."""
    for module in (connections, http1_connection):
        monkeypatch.setattr(module, "DRAIN_IDLE_S", WAIT_S_MAX)
    reader, writer = await server.open()
    for request in before:
        writer.write(request)
        await read_response(reader)
    await until(lambda: server.wire.connections)
    drain = asyncio.create_task(server.wire.drain(WAIT_S_MAX))
    await asyncio.sleep(0)
    writer.write(request_sent)
    status, headers, _ = await read_response(reader)
    assert (status, headers[b"connection"]) == (200, b"close")
    assert await reader.read() == b""
    writer.close()
    await drain


@pytest.mark.parametrize("request_sent", [post(BODY), get("/health/live")])
async def test_connection_closed_by_a_drain_is_not_closed_twice(
    server: OurServer, request_sent: bytes
) -> None:
    """Checks a client that closes late. A second lingering close once replaced the first, which was
    never removed, and the drain waited for it.
    """
    reader, writer = await server.open(post(BODY))
    await read_response(reader)
    connection = server.connection
    connection.drain()
    writer.write(request_sent)
    await read_response(reader)
    await until(lambda: connection not in server.wire.connections)
    (lingering,) = server.wire.connections
    connection._close_if_idle()
    assert server.wire.connections == {lingering}
    writer.close()
    await until(lambda: not server.wire.connections)


async def test_drain_answers_a_request_of_a_connection_not_yet_accepted(
    server: OurServer,
) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(post(BODY))
        drain = asyncio.create_task(server.wire.drain(WAIT_S_MAX))
        response = await asyncio.get_running_loop().run_in_executor(None, client.recv, 4096)
    assert response.startswith(b"HTTP/1.1 200 OK\r\n")
    await drain
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))


async def test_drain_answers_all_pipelined_requests_of_a_slow_reader(
    server: OurServer,
) -> None:
    reader, _ = await server.open(post(LARGE_BODY) * 2)
    await until(
        lambda: (
            server.outcomes()
            and server.connection.is_write_paused
            and server.connection.is_read_paused
        )
    )
    server.connection.drain()
    statuses_and_headers = [(await read_response(reader))[:2] for _ in range(2)]
    assert [status for status, _ in statuses_and_headers] == [200, 200]
    assert [headers.get(b"connection") for _, headers in statuses_and_headers] == [None, b"close"]
    assert await reader.read() == b""


@pytest.mark.parametrize("sent", [post(LARGE_BODY), post(LARGE_BODY) + b"\r\n"])
async def test_drain_closes_a_connection_after_a_slow_reader_has_its_response(
    server: OurServer, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """Checks a response from before the drain, which therefore has no `Connection: close`."""
    monkeypatch.setattr(http1_connection, "DRAIN_IDLE_S", SHORT_IDLE_S)
    reader, writer = await server.open(sent)
    await until(lambda: server.outcomes() and server.connection.is_write_paused)
    drain = asyncio.create_task(server.wire.drain(60))
    await asyncio.sleep(2 * SHORT_IDLE_S)  # longer than an idle connection stays open
    status, headers, _ = await read_response(reader)
    assert (status, headers.get(b"connection")) == (200, None)
    assert await reader.read() == b""
    writer.close()
    await drain


async def test_drain_closes_a_connection_with_an_empty_line_after_its_request(
    server: OurServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks an empty line behind a request with a response; another request may begin with it."""
    monkeypatch.setattr(http1_connection, "DRAIN_IDLE_S", SHORT_IDLE_S)
    reader, _ = await server.open_held(engine, post(BODY) + b"\r\n")
    server.connection.drain()
    await asyncio.sleep(2 * SHORT_IDLE_S)
    engine.release()
    assert (await read_response(reader))[0] == 200
    assert await reader.read() == b""


async def test_drain_answers_a_request_followed_by_an_incomplete_request(
    server: OurServer, engine: FakeEngine
) -> None:
    """Checks an incomplete second request: its connection must not end before the first
    response.
    """
    reader, _ = await server.open_held(engine, chunked(BODY) + get("/health/live")[:20])
    server.connection.drain()
    await asyncio.sleep(2 * DRAIN_IDLE_S)  # longer than an idle connection stays open
    engine.release()
    status, headers, _ = await read_response(reader)
    assert (status, headers[b"connection"]) == (200, b"close")
    assert await reader.read() == b""


async def test_late_request_during_a_drain_does_not_truncate_the_last_response(
    server: OurServer, engine: FakeEngine
) -> None:
    reader, writer = await server.open_held(engine, post(LARGE_BODY))
    server.connection.drain()
    engine.release()
    await until(server.outcomes)
    writer.write(post(BODY))
    assert len(json.loads((await read_response(reader))[2])["values"]) == 2000
    assert await reader.read() == b""


async def test_drain_waits_for_the_body_and_sends_the_error_with_connection_close(
    server: OurServer,
) -> None:
    reader, writer = await server.open(post(MISSING_ROW_BODY)[:-3])
    await until(lambda: server.http1() and server.connection._context)
    server.connection.drain()
    writer.write(MISSING_ROW_BODY[-3:])
    status, headers, _ = await read_response(reader)
    assert (status, headers[b"connection"]) == (400, b"close")
    assert await reader.read() == b""
