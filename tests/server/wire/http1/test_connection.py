"""Tests that HTTP/1 requests are bounded, checked by RFC 9112, and rejected in one format."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import pytest
from server.fake_engine import FakeEngine
from server.raw_http import Http1Response, OurServer, chunked, cut, get, post, read_response
from server.waiting import until

from embedserve.config import Limits
from embedserve.pipeline import UPLOAD_S_MAX
from embedserve.wire.asgi import MANAGEMENT_BODY_BYTES_MAX
from embedserve.wire.http1.connection import CHUNK_BYTES, HEAD_S_MAX
from embedserve.wire.http1.request_parser import HEAD_BYTES_MAX, HEAD_LINES_MAX
from embedserve.wire.http1.stream import CONTINUE
from embedserve.wire.http_stream import PROGRESS_BYTES_MIN, UNSENT_S_MAX

BODY = b'{"features": {"user": [[1, 2]], "movie": [[3]]}}'
UPGRADE_LINES = (
    "Connection: Upgrade, HTTP2-Settings",
    "Upgrade: h2c",
    "HTTP2-Settings: AAEAAEAAAAIAAAA",
)
BODY_BYTES_MAX = 50_000
UNREAD_BYTES_MAX = 1_000_000
LARGE = json.dumps({"features": {"user": [[i % 7] for i in range(8000)]}}).encode()
"""A request whose response has about 350 KB, so that the sockets hold few responses."""
LIVE = get("/health/live")
LIMITS = Limits(
    body_bytes_max=BODY_BYTES_MAX, connection_bytes_max=UNREAD_BYTES_MAX, inline_bytes_max=0
)


async def send_request(server: OurServer, *packets: bytes) -> tuple[Http1Response, bytes]:
    """Returns (response, bytes after it until the server closed the connection)."""
    reader, writer = await server.open()
    for packet in packets:
        writer.write(packet)
        await asyncio.sleep(0)
    response = await read_response(reader)
    rest = await reader.read()
    return response, rest


def error_of(response: Http1Response) -> dict[str, str]:
    status, headers, body = response
    assert status >= 400
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"connection"] == b"close"
    error: dict[str, str] = json.loads(body)["error"]
    return error


# Upgrade


@pytest.mark.parametrize("make", [post, chunked])
@pytest.mark.parametrize("lines", [UPGRADE_LINES, ("Connection: upgrade", "Upgrade: any/1")])
@pytest.mark.parametrize("ends", [(), (60,), (-3,), (-len(BODY),), range(0, 300, 7)])
async def test_upgrade_is_ignored(
    server: OurServer, make: Callable[..., bytes], lines: tuple[str, ...], ends: tuple[int, ...]
) -> None:
    """Sends the Upgrade header that Java's HttpClient and curl --http2 send in the first
    request.
    """
    request = make(BODY, *lines)
    reader, writer = await server.open()
    expected = None
    for sent in (post(BODY), request, request, LIVE, post(BODY)):
        packets = cut(sent, [end % len(sent) for end in ends if end < len(sent)])
        for packet in packets:
            writer.write(packet)
            await asyncio.sleep(0)
        status, _, body = await read_response(reader)
        expected = expected or body
        assert status == 200
        assert sent == LIVE or body == expected


async def test_pipelined_upgrades_are_ignored(server: OurServer) -> None:
    reader, _ = await server.open(
        (post(BODY, *UPGRADE_LINES) + get("/health/live", *UPGRADE_LINES)) * 50 + chunked(BODY)
    )
    statuses = [(await read_response(reader))[0] for _ in range(101)]
    assert statuses == [200] * 101


# Headers


INVALID_REQUESTS = {
    "CONNECT": (
        b"CONNECT other:443 HTTP/1.1\r\nHost: other:443\r\n\r\nTLS",
        400,
        "method is CONNECT: this is no proxy",
    ),
    "no Host": (b"GET /health/live HTTP/1.1\r\n\r\n", 400, "there are 0 Host headers"),
    "two Hosts": (get("/health/live", "Host: other"), 400, "there are 2 Host headers"),
    "two Hosts of an embed": (post(BODY, "Host: other"), 400, "there are 2 Host headers"),
    "two Hosts of an upgrade": (
        post(BODY, "Host: other", *UPGRADE_LINES),
        400,
        "there are 2 Host headers",
    ),
    "HTTP/2.0": (LIVE.replace(b"/1.1", b"/2.0"), 505, "the request says HTTP/2.0: send HTTP/1.1"),
    "a transfer coding besides chunked": (
        chunked(BODY, "Transfer-Encoding: gzip"),
        501,
        "Transfer-Encoding is 'gzip', expected 'chunked'",
    ),
    "two transfer codings": (
        chunked(BODY).replace(b": chunked", b": gzip, Chunked"),
        501,
        "Transfer-Encoding is 'gzip, Chunked', expected 'chunked'",
    ),
    "garbage": (b"GET / HTTP/1.1\r\nno header\r\n\r\n", 400, "not a request of HTTP/1.1: "),
    "no URL": (
        get("http://h:port/x"),
        400,
        "not a request of HTTP/1.1: its URL is 'http://h:port/x'",
    ),
    "many lines": (
        get("/health/live", *[f"x-{i}: 1" for i in range(HEAD_LINES_MAX)]),
        431,
        f"the headers have {HEAD_LINES_MAX + 1} lines, the limit is {HEAD_LINES_MAX}",
    ),
    "many lines of an embed": (
        post(BODY, *[f"x-{i}: 1" for i in range(HEAD_LINES_MAX)]),
        431,
        f"lines, the limit is {HEAD_LINES_MAX}",
    ),
    "a long value": (
        get("/health/live", "x-long: " + "a" * HEAD_BYTES_MAX),
        431,
        f"bytes, the limit is {HEAD_BYTES_MAX}",
    ),
    "a long path": (get("/" + "a" * HEAD_BYTES_MAX), 431, f"bytes, the limit is {HEAD_BYTES_MAX}"),
    "a large body": (
        post(b"", length=BODY_BYTES_MAX + 1),
        413,
        f"body has {BODY_BYTES_MAX + 1} bytes, the limit is {BODY_BYTES_MAX}",
    ),
}


@pytest.mark.parametrize("name", INVALID_REQUESTS)
@pytest.mark.parametrize("packet_bytes", [1 << 16, 1000])
async def test_invalid_headers_are_rejected_with_a_json_error(
    server: OurServer, name: str, packet_bytes: int
) -> None:
    """Checks that the server rejects without reading a body that is too large."""
    raw_headers, status, message = INVALID_REQUESTS[name]
    packets = [raw_headers[i : i + packet_bytes] for i in range(0, len(raw_headers), packet_bytes)]
    response, rest = await send_request(server, *packets)
    assert (response[0], rest) == (status, b"")
    assert message in error_of(response)["message"]
    assert server.outcomes() == {error_of(response)["code"]: 1}


async def test_large_body_of_a_management_route_is_rejected_unread(server: OurServer) -> None:
    response, rest = await send_request(server, post(b"", url="/models", length=10**12))
    limit = MANAGEMENT_BODY_BYTES_MAX
    assert error_of(response)["message"] == f"body has {10**12} bytes, the limit is {limit}"
    assert (response[0], rest) == (413, b"")


@pytest.mark.parametrize("make", [post, chunked])
@pytest.mark.parametrize("value", ["100-continue", "100-Continue"])
async def test_expect_100_continue_is_answered_before_the_body(
    server: OurServer, make: Callable[..., bytes], value: str
) -> None:
    raw_headers, end, body = make(BODY, f"Expect: {value}").partition(b"\r\n\r\n")
    reader, writer = await server.open(raw_headers + end)
    assert await reader.readexactly(len(CONTINUE)) == CONTINUE
    writer.write(body)
    assert (await read_response(reader))[0] == 200


async def test_http_1_0_client_gets_no_100_continue(server: OurServer) -> None:
    """Checks that the expectation is ignored (RFC 9110, section 10.1.1)."""
    raw_headers, end, body = post(BODY, "Expect: 100-continue", version="1.0").partition(
        b"\r\n\r\n"
    )
    response, rest = await send_request(server, raw_headers + end, body)
    assert (response[0], rest) == (200, b"")


async def test_rejected_request_gets_no_100_continue(
    server: OurServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Sends the header and the error in one packet."""
    raw_headers = "POST /models/shop/embed HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\n"
    chunked = f"{raw_headers}Transfer-Encoding: chunked\r\n\r\nno chunk\r\n".encode()
    response, rest = await send_request(server, chunked)
    assert (response[0], rest) == (400, b"")
    assert "not a request of HTTP/1.1" in error_of(response)["message"]
    await asyncio.sleep(0)
    assert caplog.messages == []


async def test_headers_within_the_limits_are_accepted(server: OurServer) -> None:
    long = "x-long: " + "a" * (HEAD_BYTES_MAX - 200)
    many = [f"x-{i}: 1" for i in range(HEAD_LINES_MAX - 1)]
    reader, writer = await server.open()
    for request in (get("/health/live", long), get("/health/live", *many), post(BODY, long)):
        # Requests before it in the same packet do not count towards its limits.
        writer.write(LIVE * 100 + request)
        assert {(await read_response(reader))[0] for _ in range(101)} == {200}


async def test_http_1_0_request_needs_no_host_header(server: OurServer) -> None:
    response, _ = await send_request(server, b"GET /health/live HTTP/1.0\r\n\r\n")
    assert response[0] == 200


@pytest.mark.parametrize(
    "raw_headers", [b"GET / HTTP/1.1\r\nx: ", b"GET /", b"GET / HTTP/1.1\r\nx"]
)
async def test_endless_headers_are_rejected_at_the_byte_limit(
    server: OurServer, raw_headers: bytes
) -> None:
    reader, _ = await server.open(raw_headers + b"a" * (HEAD_BYTES_MAX + 3 * CHUNK_BYTES))
    assert error_of(await read_response(reader))["message"].endswith("the limit is 16384")


# Pipelines


async def test_pipelined_requests_parsed_ahead_are_bounded_by_one_chunk(server: OurServer) -> None:
    reader, writer = await server.open()
    requests = 2000
    writer.write(get("/x") * requests)
    most = 0
    for _ in range(requests):
        assert (await read_response(reader))[0] == 404
        (connection,) = server.http1()
        most = max(most, len(connection._streams))
    assert 0 < most <= CHUNK_BYTES // len(get("/x")) + 1  # a request began in the previous chunk


async def test_garbage_after_a_request_does_not_lose_its_response(
    server: OurServer, engine: FakeEngine
) -> None:
    reader, writer = await server.open_held(engine, chunked(BODY))
    writer.write(b"no request\r\n\r\n")
    await asyncio.sleep(0)
    engine.release()
    status, _, body = await read_response(reader)
    assert (status, json.loads(body)["model"]) == (200, "shop")
    error = error_of(await read_response(reader))
    assert error["message"].startswith("not a request of HTTP/1.1: ")
    assert await reader.read() == b""
    assert server.outcomes() == {"OK": 1, "INVALID_ARGUMENT": 1}


async def test_request_with_a_malformed_body_counts_once(server: OurServer) -> None:
    reader, writer = await server.open(chunked(BODY).removesuffix(b"0\r\n\r\n"))
    await until(lambda: server.http1() and server.connection.is_busy())
    writer.write(b"no chunk\r\n")
    error = error_of(await read_response(reader))
    assert error["message"].startswith("not a request of HTTP/1.1: ")
    assert await reader.read() == b""
    assert server.outcomes() == {"INVALID_ARGUMENT": 1}


async def test_connection_with_incomplete_headers_is_closed_after_the_timeout(
    server: OurServer,
) -> None:
    reader, _ = await server.open(b"POST /embed HTTP/1.1\r\nHost: h\r\nX-Half:")
    await until(lambda: server.http1() and server.connection.is_busy())
    server.connection.check_time(perf_counter() + HEAD_S_MAX - 5)
    assert not server.connection.transport.is_closing()
    server.connection.check_time(perf_counter() + HEAD_S_MAX)
    assert await reader.read() == b""


@pytest.mark.parametrize("make", [post, chunked])
async def test_incomplete_body_is_rejected_after_the_timeout(
    server: OurServer, make: Callable[..., bytes]
) -> None:
    reader, _ = await server.open(make(BODY)[:-5])
    await until(lambda: server.http1() and server.connection.is_busy())
    server.connection.check_time(perf_counter() + UPLOAD_S_MAX - 5)
    assert server.connection.is_busy()
    server.connection.check_time(perf_counter() + UPLOAD_S_MAX)
    response = await read_response(reader)
    assert (response[0], error_of(response)["code"]) == (504, "DEADLINE_EXCEEDED")
    assert await reader.read() == b""


# Unread responses


async def test_connection_with_an_unread_response_is_closed_after_the_timeout(
    server: OurServer,
) -> None:
    reader, _ = await server.open(post(LARGE))
    await until(lambda: server.http1() and server.connection.is_write_paused)
    assert server.wire._checking is not None
    server.wire._checking.cancel()  # the times passed below are ahead of the server's clock
    connection, start_s = server.connection, perf_counter()
    connection.check_time(start_s)
    connection.check_time(start_s + UNSENT_S_MAX - 1)
    before = connection.unsent_bytes
    await reader.readexactly(2 * PROGRESS_BYTES_MIN)
    await until(lambda: connection.unsent_bytes <= before - PROGRESS_BYTES_MIN)
    connection.check_time(start_s + UNSENT_S_MAX + 1)  # it has read some bytes since
    connection.check_time(start_s + 2 * UNSENT_S_MAX)
    assert connection.is_write_paused
    connection.check_time(start_s + 2 * UNSENT_S_MAX + 2)
    await until(lambda: not server.wire.connections)


async def test_whole_response_counts_as_held_until_the_client_has_read_it(
    server: OurServer,
) -> None:
    """Checks that the whole response counts: uvloop keeps all chunks of a write until the last."""
    reader, _ = await server.open(post(LARGE))
    await until(lambda: server.http1() and server.connection.is_write_paused)
    connection = server.connection
    whole, before = connection.held_bytes, connection.unsent_bytes
    assert whole > before
    received = await reader.readexactly(2 * PROGRESS_BYTES_MIN)
    await until(lambda: connection.unsent_bytes < before)
    assert connection.held_bytes == whole
    received += await reader.readexactly(whole - len(received))
    await until(lambda: not connection.held_bytes)


async def test_connections_with_most_unread_bytes_are_closed_over_the_total_limit(
    server: OurServer, caplog: pytest.LogCaptureFixture
) -> None:
    limits = server.wire._limits
    server.wire._limits = replace(limits, connection_bytes_max=10 * UNREAD_BYTES_MAX)
    clients = []
    for examples in (6000, 7600, 7800):
        features = {"user": [[i % 7] for i in range(examples)]}
        reader, writer = await server.open(post(json.dumps({"features": features}).encode()))
        clients.append((reader, writer))
        await until(
            lambda: [one.is_write_paused for one in server.http1()] == [True] * len(clients)
        )
    unread = sorted(one.held_bytes for one in server.http1())
    assert sum(unread) > UNREAD_BYTES_MAX > sum(unread[:2])
    server.wire._limits = limits  # only once all three wait, since the server may check at any time
    await until(lambda: len(server.wire.connections) == 2)  # the server checks every second
    assert sorted(one.held_bytes for one in server.wire.connections) == unread[:2]
    assert "connections are closed: 1, because all together held" in caplog.text
    for reader, _ in clients[:2]:
        assert (await read_response(reader))[0] == 200
