"""Tests of the limits of all connections together: their number, held bytes, file descriptors."""

import asyncio
import errno
import logging
import os
from typing import NoReturn

import pytest
from server.raw_http import OurServer, chunked, get, post, read_response
from server.waiting import until

from embedserve.config import Limits
from embedserve.wire.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    frame_header,
)
from embedserve.wire.http2.header_blocks import encode
from embedserve.wire.http2.protocol import STREAM_BYTES

CONNECTIONS_MAX = 4
BODY = b" " * 200_000
LIVE = get("/health/live")
BYTES_MAX = 300_000
LIMITS = Limits(connections_max=CONNECTIONS_MAX, connection_bytes_max=BYTES_MAX)


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Waits for the connection's end; returns False if a byte arrives instead."""
    try:
        return await reader.read(1) == b""
    except ConnectionResetError:
        return True


async def test_connections_over_the_limit_are_closed_and_others_served(
    server: OurServer, caplog: pytest.LogCaptureFixture
) -> None:
    clients = [await server.open() for _ in range(CONNECTIONS_MAX)]
    await until(lambda: len(server.wire.connections) == CONNECTIONS_MAX)
    for _ in range(3):
        assert await is_closed((await server.open())[0])
    assert [record.getMessage() for record in caplog.records] == [
        "new connections are closed: there are connections_max, 4"
    ]
    assert counted(server) == (CONNECTIONS_MAX, 3)
    for reader, writer in clients:
        writer.write(LIVE)
        assert (await read_response(reader))[0] == 200
    clients[0][1].close()
    await until(lambda: len(server.wire.connections) < CONNECTIONS_MAX)
    reader, writer = await server.open(LIVE)
    assert (await read_response(reader))[0] == 200


def counted(server: OurServer) -> tuple[float, float]:
    """Returns the numbers of open and of rejected connections in the metrics."""
    metrics = server.pipeline.metrics.connections
    metrics.flush()
    (_, _, opened), (_, _, rejected) = metrics.samples()
    assert isinstance(opened, float)
    assert isinstance(rejected, float)
    return opened, rejected


def http2_body() -> bytes:
    """Returns an HTTP/2 request and as much of its body as the initial windows admit."""
    block = b"\x83\x86\x44\x06/embed"
    frames = [frame_header(len(block), HEADERS, END_HEADERS, 1) + block]
    frames += [frame_header(16_000, DATA, 0, 1) + bytes(16_000)] * 4
    return PREFACE + frame_header(0, 4, 0, 0) + b"".join(frames)


@pytest.mark.parametrize(
    "begun",
    [post(BODY), chunked(BODY)[:-5], http2_body()],
    ids=["a known head", "chunks", "HTTP/2"],
)
async def test_incomplete_bodies_count_toward_the_limit(server: OurServer, begun: bytes) -> None:
    await server.open(begun[:-1])
    expected = 64_000 - 1 if begun.startswith(PREFACE) else len(BODY) - 1
    await until(lambda: sum(one.held_bytes for one in server.wire.connections) >= expected - 16_000)
    (connection,) = server.wire.connections
    assert connection.held_bytes <= expected + STREAM_BYTES + 200


async def read_blocks(
    server: OurServer, numbers: range
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Opens an HTTP/2 connection and sends probes with different headers, one for each number."""
    reader, writer = await server.open(PREFACE + frame_header(0, SETTINGS, 0, 0))
    for number in numbers:
        named = encode([(b":path", b"/health/live"), (b"n", b"%d" % number)])
        block = b"\x82\x86" + named + b"\x8f" * 100
        writer.write(
            frame_header(len(block), HEADERS, END_HEADERS | END_STREAM, 2 * number + 1) + block
        )
    return reader, writer


async def test_cached_headers_are_dropped_before_connections_are_closed(
    server: OurServer, caplog: pytest.LogCaptureFixture
) -> None:
    def held() -> list[int]:
        return sorted(one.held_bytes for one in server.wire.connections)

    clients = [await read_blocks(server, range(8)) for _ in range(2)]
    await until(lambda: len(held()) == 2 and held()[0] > 8 * 13_000)
    clients.append(await read_blocks(server, range(8)))
    await until(lambda: len(held()) == 3 and held()[2] < 1000)  # the server checks every second
    assert not any(reader.at_eof() for reader, _ in clients)
    assert caplog.text == ""


async def test_connections_with_the_largest_bodies_are_closed_first(
    server: OurServer, caplog: pytest.LogCaptureFixture
) -> None:
    small, large = await server.open(), await server.open()
    small[1].write(post(BODY)[:-150_000])
    large[1].write(post(BODY * 2)[:-1])
    assert await is_closed(large[0])
    assert "connections are closed: 1, because all together held more than" in caplog.text
    (record,) = (one for one in caplog.records if "connections are closed" in one.message)
    assert vars(record)["fields"] == {"address": "127.0.0.1"}
    small[1].write(post(BODY)[-150_000:])
    assert (await read_response(small[0]))[0] == 400  # the body was read; spaces are invalid


async def test_exhausted_file_descriptors_are_logged(
    server: OurServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulates the kernel's error: a lower limit here would stop other threads of the tests."""

    def no_more(descriptor: int) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "dup", no_more)
    await until(lambda: caplog.records)  # the server checks every second
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "new connections wait: Too many open files (0 are open)" in record.getMessage()
