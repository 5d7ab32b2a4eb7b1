"""Tests of the fast path: responses equal the slow path's and plain uvicorn's, in order."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import perf_counter

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server.arrow_streams import ARROW, columns_of, stream_of
from server.fake_engine import FakeEngine, model_info
from server.live import IN_THREAD, PROTOBUF, make_pipeline
from server.raw_http import (
    OurServer,
    PlainServer,
    chunked,
    cut,
    get,
    our_server,
    plain_server,
    post,
    read_answer,
)
from server.waiting import WAIT_S_MAX, until

from embedserve.config import Limits
from embedserve.pipeline import RequestPipeline
from embedserve.wire import connections
from embedserve.wire.connections import DRAIN_IDLE_S, FIRST_BYTES_S_MAX
from embedserve.wire.http1 import connection as http1_connection
from embedserve.wire.http1.connection import KEEP_ALIVE_S
from embedserve.wire.http1.stream import CONTINUE
from embedserve_proto import embedding_pb2 as pb

BODY = b'{"features": {"user": [[1, 2]], "movie": [[3]]}}'
OTHER = b'{"features": {"user": [[6], [5]]}}'
BAD = b'{"features": {"user": [[99]]}}'
MESSAGE = pb.EmbedRequest(keys=["user"], ids=[1, 2], lengths=[2]).SerializeToString()
LARGE = json.dumps({"features": {"user": [[i % 7] for i in range(2000)]}}).encode()
LAST = get("/health/live", "Connection: close")
LIMITS = Limits(body_bytes_max=1000, request_examples_max=8)
SHORT_IDLE_S = 0.05
"""Replaces DRAIN_IDLE_S in a test that waits for longer than that."""


@pytest.fixture
def pipeline(engine: FakeEngine, executor: ThreadPoolExecutor, limits: Limits) -> RequestPipeline:
    """Returns a pipeline that looks up inline."""
    films = FakeEngine(model_info("films", {"user": (7, 2)}), seed=1)
    return make_pipeline(engine, films, executor=executor, limits=limits)


@pytest.fixture
async def plain(engine: FakeEngine, executor: ThreadPoolExecutor) -> AsyncIterator[PlainServer]:
    """Runs plain uvicorn over an equal pipeline."""
    films = FakeEngine(model_info("films", {"user": (7, 2)}), seed=1)
    async with plain_server(
        make_pipeline(engine, films, executor=executor, limits=LIMITS)
    ) as server:
        yield server


@pytest.fixture
async def slow(engine: FakeEngine, executor: ThreadPoolExecutor) -> AsyncIterator[OurServer]:
    """Runs a server that looks up in a thread, where the engine can be held."""
    pipeline = make_pipeline(engine, executor=executor, limits=IN_THREAD)
    async with our_server(pipeline) as server:
        yield server


def parsed_url(server: OurServer) -> str:
    """Returns the URL that llhttp parsed last on the open connection; "" before the first."""
    return server.connection._parser._url.decode()


def _has_looked_up(engine: FakeEngine, count: int) -> bool:
    return len(engine.lookups) == count


STREAM = stream_of(columns_of({"user": [[1], [2, 3]]}))
PLAIN_REQUESTS = {
    "json": (BODY, [], "/embed"),
    "several examples": (OTHER, [], "/embed"),
    "named model": (b'{"features": {"user": [[1]]}}', [], "/models/films/embed"),
    "protobuf": (MESSAGE, [f"Content-Type: {PROTOBUF}"], "/embed"),
    "json, answered as protobuf": (BODY, [f"Accept: {PROTOBUF}"], "/embed"),
    "protobuf, answered as json": (
        MESSAGE,
        [f"Content-Type: {PROTOBUF}", "Accept: application/json"],
        "/embed",
    ),
    "arrow": (STREAM, [f"Content-Type: {ARROW}"], "/embed"),
    "not arrow": (b"{", [f"Content-Type: {ARROW}"], "/embed"),
    "in time": (BODY, ["X-Timeout-Ms: 20000"], "/embed"),
    "too late": (BODY, ["X-Timeout-Ms: 1e-9"], "/embed"),
    "no row": (BAD, [], "/embed"),
    "not json": (b"{", [], "/embed"),
    "nothing": (b"", [], "/embed"),
    "not protobuf": (b"{", [f"Content-Type: {PROTOBUF}"], "/embed"),
    "unknown model": (BODY, [], "/models/nobody/embed"),
    "unprintable model": (BODY, [], '/models/a"<|>/embed'),
    "too many examples": (
        json.dumps({"features": {"user": [[1]] * 9}}).encode(),
        [],
        "/embed",
    ),
}


@pytest.mark.parametrize("name", PLAIN_REQUESTS)
async def test_a_request_is_answered_alike_off_the_fast_path(server: OurServer, name: str) -> None:
    body, lines, url = PLAIN_REQUESTS[name]
    lines = [*lines, "X-Request-Id: same"]
    reader, writer = await server.open()
    writer.write(post(body, *lines, url=url))
    fast = await read_answer(reader)
    assert parsed_url(server) == ""
    counted = server.outcomes()
    assert sum(counted.values()) == 1
    response_bytes = server.pipeline.metrics.protocols["rest"].response_bytes
    writer.write(chunked(body, *lines, url=url))
    slow = await read_answer(reader)
    assert parsed_url(server) == url
    if name == "too late":  # the error contains the delay
        assert fast[0] == slow[0] == 504
        assert json.loads(fast[2])["error"]["code"] == json.loads(slow[2])["error"]["code"]
    else:
        assert fast == slow
    assert fast[1].keys() == slow[1].keys()
    assert server.outcomes() == {outcome: 2 * count for outcome, count in counted.items()}
    assert server.pipeline.metrics.protocols["rest"].response_bytes == 2 * response_bytes
    writer.close()


ODD_REQUESTS = {
    "http 1.0": post(BODY, version="1.0"),
    "http 1.0, kept alive": post(BODY, "Connection: keep-alive", version="1.0"),
    "close": post(BODY, "Connection: close"),
    "keep-alive": post(BODY, "Connection: keep-alive") + LAST,
    "expect": post(BODY, "Expect: 100-continue") + post(OTHER) + LAST,
    "query": post(BODY, url="/embed?a=1") + post(OTHER) + LAST,
    "percent": post(b'{"features": {"user": [[1]]}}', url="/models/%66ilms/embed") + LAST,
    "absolute url": post(BODY, url="http://test/embed") + LAST,
    "compressed": post(BODY, "Content-Encoding: gzip") + post(OTHER) + LAST,
    "bad timeout": post(BODY, "X-Timeout-Ms: soon") + post(OTHER) + LAST,
    "lower case": post(BODY).replace(b"Content-Length", b"content-length") + LAST,
    "long head": post(BODY, "X: " + "a" * 5000) + post(OTHER) + LAST,
    "no length": get("/embed").replace(b"GET", b"POST") + post(OTHER) + LAST,
    "length 0": post(b"") + post(OTHER) + LAST,
    "length below 0": post(BODY, length=-1) + LAST,
    "length not a number": post(BODY).replace(b"Length: ", b"Length: x") + LAST,
    "length with a plus": post(BODY).replace(b"Length: ", b"Length: +") + LAST,
    "length with a zero": post(BODY).replace(b"Length: ", b"Length: 0") + LAST,
    "length past 64 bits": post(BODY, length=2**70) + LAST,
    "length twice": post(BODY, f"Content-Length: {len(BODY)}") + LAST,
    "two lengths": post(BODY, "Content-Length: 3") + LAST,
    "length and chunked": post(BODY, "Transfer-Encoding: chunked") + LAST,
    "chunked and length": chunked(BODY, "Content-Length: 3") + LAST,
    "folded line": post(BODY).replace(b"Length: ", b"Length:\r\n ") + LAST,
    "space before colon": post(BODY).replace(b"Length:", b"Length :") + LAST,
    "NUL": post(BODY, "X: a\0b") + LAST,
    "bare line feeds": post(BODY).replace(b"\r\n", b"\n") + LAST,
    "bare line feed at the end": post(BODY).replace(b"\r\n\r\n", b"\n\n") + LAST,
    "line feeds before": b"\r\n\r\n" + post(BODY) + b"\r\n" + post(OTHER) + LAST,
    "upgrade without connection": post(BODY, "Upgrade: h2c") + post(OTHER) + LAST,
    "other methods": get("/embed") + get("/embed").replace(b"GET", b"HEAD") + post(BODY) + LAST,
    "unknown path": post(BODY, url="/embed/") + post(OTHER) + LAST,
    "body that reads as a request": post(post(BODY)) + post(OTHER) + LAST,
}


UVICORNS_REFUSAL = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain"
JSON_REFUSAL = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize("name", ODD_REQUESTS)
async def test_what_a_client_may_send_is_answered_as_by_uvicorn_alone(
    server: OurServer, plain: PlainServer, name: str
) -> None:
    """Allows two differences. uvicorn rejects invalid HTTP in plain text and does not count it. It
    also sends 100 (Continue) even after the body.
    """
    sent = ODD_REQUESTS[name]
    answers = comparable(await server.talk(sent))
    expected = comparable(await plain.talk(sent)).replace(CONTINUE, b"")
    expected, of_uvicorn, _ = expected.partition(UVICORNS_REFUSAL)
    await until(
        lambda: (
            Counter(server.outcomes()) - Counter(plain.outcomes())
            == Counter(["INVALID_ARGUMENT"] * bool(of_uvicorn))
        )
    )
    if of_uvicorn:
        answers, refusal, error = answers.partition(JSON_REFUSAL)
        assert refusal
        assert b"\r\nconnection: close\r\n\r\n" in error
        assert b'"message":"not a request of HTTP/1.1: ' in error
    assert answers == expected


@pytest.mark.parametrize(
    "first", [b"\x16\x03\x01\x02", b"GET /embed", b"EHLO client", b"POST /embed HTTPS/1.1"]
)
async def test_what_does_not_begin_with_a_request_line_is_closed_without_an_answer(
    server: OurServer, first: bytes
) -> None:
    assert await server.talk(first + b"\r\n\r\n" + post(BODY)) == b""
    assert server.outcomes() == {}
    assert (await server.talk(post(BODY) + LAST)).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("count", [1, 2, 3, 10, 30])
async def test_the_protocol_is_told_apart_however_few_bytes_come_first(
    server: OurServer, plain: PlainServer, count: int
) -> None:
    sent = post(BODY, url="/embed") + LAST
    reader, writer = await server.open()
    writer.write(sent[:count])
    await until(lambda: server.wire.connections)
    await asyncio.sleep(0.01)  # the rest arrives in another read
    writer.write(sent[count:])
    assert await reader.read() == await plain.talk(sent)
    writer.close()


MIXED = [
    post(BODY),
    post(b"{"),
    get("/models"),
    post(OTHER),
    chunked(BODY),
    post(BAD),
    post(MESSAGE, f"Content-Type: {PROTOBUF}"),
    get("/nothing"),
    post(b""),
]


async def test_a_request_may_be_split_anywhere(server: OurServer) -> None:
    reader, writer = await server.open()
    whole = post(BODY)
    writer.write(whole)
    _, _, expected = await read_answer(reader)
    for where in range(1, len(whole)):
        for packet in cut(whole, [where]):  # not through the socket, which may join the two
            server.connection.data_received(packet)
        status, _, body = await read_answer(reader)
        assert (status, body) == (200, expected)
    writer.close()


@settings(
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    requests=st.lists(st.sampled_from(MIXED), min_size=1, max_size=8),
    where=st.lists(st.integers(0, 1500), max_size=12),
)
def test_any_requests_split_anyhow_are_answered_as_by_uvicorn_alone(
    engine: FakeEngine,
    executor: ThreadPoolExecutor,
    requests: list[bytes],
    where: list[int],
) -> None:
    sent = b"".join(requests) + LAST
    packets = cut(sent, {end for end in where if end < len(sent)})

    async def compare() -> None:
        pipeline = make_pipeline(engine, executor=executor, limits=LIMITS)
        async with our_server(pipeline) as server, plain_server(pipeline) as plain:
            answers = await server.talk(*packets)
            assert comparable(answers) == comparable(await plain.talk(sent))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(compare())


@pytest.mark.parametrize("count", [2, 7, 20])
async def test_pipelined_requests_are_answered_in_order_with_others_between(
    server: OurServer, plain: PlainServer, count: int
) -> None:
    sent = b"".join(MIXED[i % len(MIXED)] for i in range(count)) + LAST
    answers = await server.talk(sent)
    assert comparable(answers) == comparable(await plain.talk(sent))
    assert answers.count(b"HTTP/1.1 ") == count + 1
    assert server.outcomes() == plain.outcomes()


def comparable(answers: bytes) -> bytes:
    """Removes generated request ids, and activation times of versions, which differ by server."""
    return re.sub(rb'"since":"[^"]*"|x-request-id: [0-9a-f]{32}\r\n', b"", answers)


async def test_metrics_between_pipelined_requests_count_those_before(server: OurServer) -> None:
    reader, writer = await server.open()
    writer.write(post(BODY) + post(OTHER) + get("/metrics") + post(BODY))
    assert [(await read_answer(reader))[0] for _ in range(2)] == [200, 200]
    status, _, text = await read_answer(reader)
    assert status == 200
    assert b'embedserve_requests_total{outcome="OK",protocol="rest"} 2.0' in text
    assert (await read_answer(reader))[0] == 200
    assert server.outcomes() == {"OK": 3}
    writer.close()


async def test_what_is_held_comes_before_what_is_read_later(
    slow: OurServer, engine: FakeEngine
) -> None:
    """Checks that the start of a request stays buffered while the kernel holds its rest."""
    engine.hold()
    reader, writer = await slow.open()
    second = post(OTHER)
    writer.write(post(BODY) + second[:30])
    await until(lambda: engine.lookups and slow.connection.is_read_paused)
    writer.write(second[30:] + LAST)
    engine.release()
    answers = [await read_answer(reader) for _ in range(3)]
    assert [status for status, _, _ in answers] == [200, 200, 200]
    assert len(json.loads(answers[1][2])["values"]) == 2
    writer.close()


async def test_refused_requests_are_answered_in_order_when_reads_are_full(
    server: OurServer, plain: PlainServer
) -> None:
    """Checks rejections that the server writes while it reads, with more input available."""
    sent = (post(b"{") + post(b"[" * 900)) * 600 + LAST
    answers = await server.talk(sent)
    assert answers.count(b"HTTP/1.1 400 Bad Request\r\n") == 1200
    assert comparable(answers) == comparable(await plain.talk(sent))


async def test_what_a_client_left_behind_is_not_answered(
    server: OurServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Checks a connection that is lost between a response and the next buffered request."""
    reader, writer = await server.open()
    writer.write(post(b"{"))
    await read_answer(reader)
    connection = server.connection
    connection.data_received(post(b"{") + post(BODY))
    connection.transport.abort()
    writer.close()
    await until(lambda: not server.http1())
    await asyncio.sleep(0)
    assert server.outcomes() == {"INVALID_ARGUMENT": 2}
    assert caplog.records == []


async def test_a_request_of_an_aborted_connection_is_not_counted_as_answered(
    slow: OurServer, engine: FakeEngine
) -> None:
    await slow.open_held(engine, post(BODY))
    slow.connection.abort()  # and its batch ends before the event loop reports the loss
    assert slow.outcomes() == {"CANCELLED": 1}
    engine.release()
    await until(lambda: not slow.http1())
    assert slow.outcomes() == {"CANCELLED": 1}


async def test_answers_that_nobody_reads_stop_the_reading(
    slow: OurServer, engine: FakeEngine
) -> None:
    """Sends one request after the other, so that none is buffered while another is looked up."""
    reader, writer = await slow.open()
    writer.write(post(LARGE))
    await until(lambda: slow.outcomes() == {"OK": 1} and slow.connection.is_write_paused)
    writer.write(post(LARGE))
    await until(lambda: slow.connection._context or slow.connection.is_read_paused)
    assert slow.connection._context is None
    assert slow.outcomes() == {"OK": 1}
    writer.write(post(LARGE))
    answers = [await read_answer(reader) for _ in range(3)]
    assert [status for status, _, _ in answers] == [200] * 3
    assert len({body for _, _, body in answers}) == 1
    assert len(json.loads(answers[0][2])["values"]) == 2000
    await until(lambda: slow.connection.transport.get_write_buffer_size() == 0)
    writer.close()


async def test_pipelined_large_answers_reach_a_slow_reader_whole(slow: OurServer) -> None:
    reader, writer = await slow.open()
    writer.write((post(LARGE) + post(LARGE, f"Accept: {PROTOBUF}")) * 3 + LAST)
    await until(lambda: slow.outcomes() and slow.connection.is_write_paused)
    assert slow.outcomes() == {"OK": 1}
    answers = [await read_answer(reader) for _ in range(6)]
    assert len(json.loads(answers[0][2])["values"]) == 2000
    assert pb.EmbedResponse.FromString(answers[1][2]).batch_size == 2000
    assert [body for _, _, body in answers] == [answers[0][2], answers[1][2]] * 3
    assert (await read_answer(reader))[0] == 200
    assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize("sent", [b"", post(BODY)[:30]])
async def test_a_drain_closes_an_idle_connection_after_a_while(
    slow: OurServer, sent: bytes
) -> None:
    reader, writer = await slow.open()
    writer.write(post(BODY))
    await read_answer(reader)
    writer.write(sent)
    await until(lambda: bool(sent) == slow.connection.is_busy())
    slow.connection.drain()
    assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize("before", [[], [post(BODY)], [get("/health/live")]])
@pytest.mark.parametrize("request_sent", [post(BODY), get("/health/live"), chunked(BODY)])
async def test_a_request_on_its_way_is_answered_in_a_drain_and_told_to_be_the_last(
    slow: OurServer, before: list[bytes], request_sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks a request on a kept-alive connection, whose client cannot know of the drain."""
    for module in (connections, http1_connection):
        monkeypatch.setattr(module, "DRAIN_IDLE_S", WAIT_S_MAX)
    reader, writer = await slow.open()
    for request in before:
        writer.write(request)
        await read_answer(reader)
    await until(lambda: slow.wire.connections)
    drain = asyncio.create_task(slow.wire.drain(WAIT_S_MAX))
    await asyncio.sleep(0)
    writer.write(request_sent)
    status, headers, _ = await read_answer(reader)
    assert (status, headers[b"connection"]) == (200, b"close")
    assert await reader.read() == b""
    writer.close()
    await drain


@pytest.mark.parametrize("request_sent", [post(BODY), get("/health/live")])
async def test_a_connection_that_a_drain_has_ended_is_not_ended_again(
    slow: OurServer, request_sent: bytes
) -> None:
    """Checks a client that closes late. A second lingering close once replaced the first, which was
    never removed, and the drain waited for it.
    """
    reader, writer = await slow.open()
    writer.write(post(BODY))
    await read_answer(reader)
    connection = slow.connection
    connection.drain()
    writer.write(request_sent)
    await read_answer(reader)
    await until(lambda: connection not in slow.wire.connections)
    (lingering,) = slow.wire.connections
    connection._close_if_idle()
    assert slow.wire.connections == {lingering}
    writer.close()
    await until(lambda: not slow.wire.connections)


async def test_a_request_of_a_connection_that_waits_to_be_accepted_is_answered(
    slow: OurServer,
) -> None:
    with socket.create_connection(("127.0.0.1", slow.port)) as client:
        client.sendall(post(BODY))
        drain = asyncio.create_task(slow.wire.drain(WAIT_S_MAX))
        answer = await asyncio.get_running_loop().run_in_executor(None, client.recv, 4096)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    await drain
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", slow.port))


async def test_a_drain_answers_what_a_slow_reader_asked(slow: OurServer) -> None:
    reader, writer = await slow.open()
    writer.write(post(LARGE) * 2)
    await until(
        lambda: (
            slow.outcomes() and slow.connection.is_write_paused and slow.connection.is_read_paused
        )
    )
    slow.connection.drain()
    heads = [(await read_answer(reader))[:2] for _ in range(2)]
    assert [status for status, _ in heads] == [200, 200]
    assert [headers.get(b"connection") for _, headers in heads] == [None, b"close"]
    assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize("sent", [post(LARGE), post(LARGE) + b"\r\n"])
async def test_a_drain_closes_a_connection_once_its_slow_reader_has_the_answer(
    slow: OurServer, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """Checks a response from before the drain, which therefore has no `Connection: close`."""
    monkeypatch.setattr(http1_connection, "DRAIN_IDLE_S", SHORT_IDLE_S)
    reader, writer = await slow.open()
    writer.write(sent)
    await until(lambda: slow.outcomes() and slow.connection.is_write_paused)
    drain = asyncio.create_task(slow.wire.drain(60))
    await asyncio.sleep(2 * SHORT_IDLE_S)  # longer than an idle connection stays open
    status, headers, _ = await read_answer(reader)
    assert (status, headers.get(b"connection")) == (200, None)
    assert await reader.read() == b""
    writer.close()
    await drain


async def test_a_drain_closes_a_connection_with_an_empty_line_behind_its_request(
    slow: OurServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks an empty line behind a request with a response; another request may begin with it."""
    monkeypatch.setattr(http1_connection, "DRAIN_IDLE_S", SHORT_IDLE_S)
    reader, writer = await slow.open_held(engine, post(BODY) + b"\r\n")
    slow.connection.drain()
    await asyncio.sleep(2 * SHORT_IDLE_S)
    engine.release()
    assert (await read_answer(reader))[0] == 200
    assert await reader.read() == b""
    writer.close()


async def test_a_drain_answers_what_was_asked_before_the_start_of_another_request(
    slow: OurServer, engine: FakeEngine
) -> None:
    """Checks an incomplete second request: its connection must not end before the first
    response.
    """
    reader, writer = await slow.open_held(engine, chunked(BODY) + get("/health/live")[:20])
    slow.connection.drain()
    await asyncio.sleep(2 * DRAIN_IDLE_S)  # longer than an idle connection stays open
    engine.release()
    status, headers, _ = await read_answer(reader)
    assert (status, headers[b"connection"]) == (200, b"close")
    assert await reader.read() == b""
    writer.close()


async def test_what_comes_after_the_last_request_takes_no_answer_away(
    slow: OurServer, engine: FakeEngine
) -> None:
    reader, writer = await slow.open_held(engine, post(LARGE))
    slow.connection.drain()
    engine.release()
    await until(slow.outcomes)
    writer.write(post(BODY))
    assert len(json.loads((await read_answer(reader))[2])["values"]) == 2000
    assert await reader.read() == b""
    writer.close()


async def test_a_drain_waits_for_the_rest_of_a_body_and_answers_an_error_with_close(
    slow: OurServer,
) -> None:
    reader, writer = await slow.open()
    writer.write(post(BAD)[:-3])
    await until(lambda: slow.http1() and slow.connection._context)
    slow.connection.drain()
    writer.write(BAD[-3:])
    status, headers, _ = await read_answer(reader)
    assert (status, headers[b"connection"]) == (400, b"close")
    assert await reader.read() == b""
    writer.close()


FAST, SLOW = post(BODY), get("/health/live")


@pytest.mark.parametrize(
    "requests", [[FAST], [SLOW], [FAST, SLOW], [SLOW, FAST], [FAST, FAST, SLOW]]
)
async def test_an_idle_connection_is_closed_after_the_same_time_whatever_it_asked(
    server: OurServer, requests: list[bytes]
) -> None:
    reader, writer = await server.open()
    for request in requests:
        last_s = perf_counter()
        writer.write(request)
        await read_answer(reader)
    connection = server.connection
    connection.check_time(last_s + KEEP_ALIVE_S)  # earlier requests are longer ago
    assert not connection.transport.is_closing()
    connection.check_time(perf_counter() + KEEP_ALIVE_S)
    assert await reader.read() == b""
    writer.close()


async def test_a_busy_connection_is_never_closed(slow: OurServer, engine: FakeEngine) -> None:
    engine.hold()
    reader, writer = await slow.open()
    for request in (SLOW, post(BODY), chunked(BODY)):
        seen = len(engine.lookups)
        writer.write(request)
        if request is SLOW:
            await read_answer(reader)
            continue
        await until(partial(_has_looked_up, engine, seen + 1))
        slow.connection.check_time(perf_counter() + 2 * KEEP_ALIVE_S)
        assert not slow.connection.transport.is_closing()
        engine.release()
        assert (await read_answer(reader))[0] == 200
        slow.connection.check_time(perf_counter())
        assert not slow.connection.transport.is_closing()
        engine.hold()
    writer.close()


async def test_a_connection_whose_answer_is_read_slowly_is_busy(slow: OurServer) -> None:
    reader, writer = await slow.open()
    writer.write(post(LARGE) * 2)
    await until(lambda: slow.outcomes() and slow.connection.is_write_paused)
    slow.connection.check_time(perf_counter() + 2 * KEEP_ALIVE_S)
    assert [(await read_answer(reader))[0] for _ in range(2)] == [200, 200]
    writer.close()


async def test_a_connection_that_sends_nothing_is_closed_soon(server: OurServer) -> None:
    reader, writer = await server.open()
    await until(lambda: server.wire.connections)
    (new,) = server.wire.connections
    new.check_time(perf_counter() + FIRST_BYTES_S_MAX - 5)
    assert server.wire.connections == {new}
    new.check_time(perf_counter() + FIRST_BYTES_S_MAX)
    assert await reader.read() == b""
    writer.close()
