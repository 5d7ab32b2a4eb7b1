"""Tests of idle HTTP/1 connections: when they are closed, and that busy ones stay open."""

from functools import partial
from time import perf_counter

import pytest
from server.fake_engine import FakeEngine
from server.live import IN_THREAD
from server.raw_http import OurServer, chunked, get, post, read_response
from server.waiting import until
from server.wire.http1.sample_requests import BODY, LARGE_BODY

from embedserve.wire.connections import FIRST_BYTES_S_MAX
from embedserve.wire.http1.connection import KEEP_ALIVE_S

LIMITS = IN_THREAD


def _has_looked_up(engine: FakeEngine, count: int) -> bool:
    return len(engine.lookups) == count


FAST, SLOW = post(BODY), get("/health/live")


@pytest.mark.parametrize(
    "requests", [[FAST], [SLOW], [FAST, SLOW], [SLOW, FAST], [FAST, FAST, SLOW]]
)
async def test_idle_timeout_is_the_same_for_fast_and_slow_path_requests(
    server: OurServer, requests: list[bytes]
) -> None:
    reader, writer = await server.open()
    for request in requests:
        last_s = perf_counter()
        writer.write(request)
        await read_response(reader)
    connection = server.connection
    connection.check_time(last_s + KEEP_ALIVE_S)  # earlier requests are longer ago
    assert not connection.transport.is_closing()
    connection.check_time(perf_counter() + KEEP_ALIVE_S)
    assert await reader.read() == b""


async def test_busy_connection_is_not_closed_as_idle(server: OurServer, engine: FakeEngine) -> None:
    engine.hold()
    reader, writer = await server.open()
    for request in (SLOW, post(BODY), chunked(BODY)):
        seen = len(engine.lookups)
        writer.write(request)
        if request is SLOW:
            await read_response(reader)
            continue
        await until(partial(_has_looked_up, engine, seen + 1))
        server.connection.check_time(perf_counter() + 2 * KEEP_ALIVE_S)
        assert not server.connection.transport.is_closing()
        engine.release()
        assert (await read_response(reader))[0] == 200
        server.connection.check_time(perf_counter())
        assert not server.connection.transport.is_closing()
        engine.hold()


async def test_connection_with_a_slowly_read_response_is_not_closed_as_idle(
    server: OurServer,
) -> None:
    reader, _ = await server.open(post(LARGE_BODY) * 2)
    await until(lambda: server.outcomes() and server.connection.is_write_paused)
    server.connection.check_time(perf_counter() + 2 * KEEP_ALIVE_S)
    assert [(await read_response(reader))[0] for _ in range(2)] == [200, 200]


async def test_connection_without_first_bytes_is_closed_after_the_timeout(
    server: OurServer,
) -> None:
    reader, _ = await server.open()
    await until(lambda: server.wire.connections)
    (new,) = server.wire.connections
    new.check_time(perf_counter() + FIRST_BYTES_S_MAX - 5)
    assert server.wire.connections == {new}
    new.check_time(perf_counter() + FIRST_BYTES_S_MAX)
    assert await reader.read() == b""
