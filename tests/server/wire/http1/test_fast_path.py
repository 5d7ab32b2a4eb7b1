"""Tests of the fast path: responses equal the slow path's and plain uvicorn's, in order."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server.arrow_streams import ARROW, columns_of, stream_of
from server.fake_engine import FakeEngine, model_info
from server.live import PROTOBUF, make_pipeline
from server.raw_http import OurServer, PlainServer, chunked, cut, get, post, read_response
from server.waiting import until
from server.wire.http1.sample_requests import BODY, CLOSING_REQUEST, MISSING_ROW_BODY, OTHER_BODY

from embedserve.config import Limits
from embedserve.pipeline import RequestPipeline
from embedserve.wire.http1.stream import CONTINUE
from embedserve_proto import embedding_pb2 as pb

MESSAGE = pb.EmbedRequest(keys=["user"], ids=[1, 2], lengths=[2]).SerializeToString()
LIMITS = Limits(body_bytes_max=1000, request_examples_max=8)


@pytest.fixture
def pipeline(engine: FakeEngine, executor: ThreadPoolExecutor, limits: Limits) -> RequestPipeline:
    """Returns a pipeline that looks up inline."""
    films = FakeEngine(model_info("films", {"user": (7, 2)}), seed=1)
    return make_pipeline(engine, films, executor=executor, limits=limits)


@pytest.fixture
async def plain(engine: FakeEngine, executor: ThreadPoolExecutor) -> AsyncIterator[PlainServer]:
    """Runs plain uvicorn over an equal pipeline."""
    films = FakeEngine(model_info("films", {"user": (7, 2)}), seed=1)
    async with PlainServer(
        make_pipeline(engine, films, executor=executor, limits=LIMITS)
    ) as server:
        yield server


def parsed_url(server: OurServer) -> str:
    """Returns the URL that llhttp parsed last on the open connection; "" before the first."""
    return server.connection._parser._url.decode()


STREAM = stream_of(columns_of({"user": [[1], [2, 3]]}))
PLAIN_REQUESTS = {
    "json": (BODY, [], "/embed"),
    "several examples": (OTHER_BODY, [], "/embed"),
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
    "no row": (MISSING_ROW_BODY, [], "/embed"),
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
async def test_fast_path_and_slow_path_responses_are_equal(server: OurServer, name: str) -> None:
    body, lines, url = PLAIN_REQUESTS[name]
    lines = [*lines, "X-Request-Id: same"]
    reader, writer = await server.open(post(body, *lines, url=url))
    fast = await read_response(reader)
    assert parsed_url(server) == ""
    counted = server.outcomes()
    assert sum(counted.values()) == 1
    response_bytes = server.pipeline.metrics.protocols["rest"].response_bytes
    writer.write(chunked(body, *lines, url=url))
    slow = await read_response(reader)
    assert parsed_url(server) == url
    if name == "too late":  # the error contains the delay
        assert fast[0] == slow[0] == 504
        assert json.loads(fast[2])["error"]["code"] == json.loads(slow[2])["error"]["code"]
    else:
        assert fast == slow
    assert fast[1].keys() == slow[1].keys()
    assert server.outcomes() == {outcome: 2 * count for outcome, count in counted.items()}
    assert server.pipeline.metrics.protocols["rest"].response_bytes == 2 * response_bytes


UNUSUAL_REQUESTS = {
    "http 1.0": post(BODY, version="1.0"),
    "http 1.0, kept alive": post(BODY, "Connection: keep-alive", version="1.0"),
    "close": post(BODY, "Connection: close"),
    "keep-alive": post(BODY, "Connection: keep-alive") + CLOSING_REQUEST,
    "expect": post(BODY, "Expect: 100-continue") + post(OTHER_BODY) + CLOSING_REQUEST,
    "query": post(BODY, url="/embed?a=1") + post(OTHER_BODY) + CLOSING_REQUEST,
    "percent": post(b'{"features": {"user": [[1]]}}', url="/models/%66ilms/embed")
    + CLOSING_REQUEST,
    "absolute url": post(BODY, url="http://test/embed") + CLOSING_REQUEST,
    "compressed": post(BODY, "Content-Encoding: gzip") + post(OTHER_BODY) + CLOSING_REQUEST,
    "bad timeout": post(BODY, "X-Timeout-Ms: soon") + post(OTHER_BODY) + CLOSING_REQUEST,
    "bad timeout after a good one": post(BODY, "X-Timeout-Ms: 9999")
    + post(BODY, "X-Timeout-Ms: soon")
    + CLOSING_REQUEST,
    "lower case": post(BODY).replace(b"Content-Length", b"content-length") + CLOSING_REQUEST,
    "long head": post(BODY, "X: " + "a" * 5000) + post(OTHER_BODY) + CLOSING_REQUEST,
    "no length": get("/embed").replace(b"GET", b"POST") + post(OTHER_BODY) + CLOSING_REQUEST,
    "length 0": post(b"") + post(OTHER_BODY) + CLOSING_REQUEST,
    "length below 0": post(BODY, length=-1) + CLOSING_REQUEST,
    "length not a number": post(BODY).replace(b"Length: ", b"Length: x") + CLOSING_REQUEST,
    "length with a plus": post(BODY).replace(b"Length: ", b"Length: +") + CLOSING_REQUEST,
    "length with a zero": post(BODY).replace(b"Length: ", b"Length: 0") + CLOSING_REQUEST,
    "length past 64 bits": post(BODY, length=2**70) + CLOSING_REQUEST,
    "length twice": post(BODY, f"Content-Length: {len(BODY)}") + CLOSING_REQUEST,
    "two lengths": post(BODY, "Content-Length: 3") + CLOSING_REQUEST,
    "length and chunked": post(BODY, "Transfer-Encoding: chunked") + CLOSING_REQUEST,
    "chunked and length": chunked(BODY, "Content-Length: 3") + CLOSING_REQUEST,
    "folded line": post(BODY).replace(b"Length: ", b"Length:\r\n ") + CLOSING_REQUEST,
    "space before colon": post(BODY).replace(b"Length:", b"Length :") + CLOSING_REQUEST,
    "NUL": post(BODY, "X: a\0b") + CLOSING_REQUEST,
    "bare line feeds": post(BODY).replace(b"\r\n", b"\n") + CLOSING_REQUEST,
    "bare line feed at the end": post(BODY).replace(b"\r\n\r\n", b"\n\n") + CLOSING_REQUEST,
    "line feeds before": b"\r\n\r\n" + post(BODY) + b"\r\n" + post(OTHER_BODY) + CLOSING_REQUEST,
    "upgrade without connection": post(BODY, "Upgrade: h2c") + post(OTHER_BODY) + CLOSING_REQUEST,
    "other methods": get("/embed")
    + get("/embed").replace(b"GET", b"HEAD")
    + post(BODY)
    + CLOSING_REQUEST,
    "unknown path": post(BODY, url="/embed/") + post(OTHER_BODY) + CLOSING_REQUEST,
    "body that reads as a request": post(post(BODY)) + post(OTHER_BODY) + CLOSING_REQUEST,
}


UVICORN_REJECTION = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain"
JSON_REJECTION = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize("name", UNUSUAL_REQUESTS)
async def test_unusual_requests_get_the_responses_of_plain_uvicorn(
    server: OurServer, plain: PlainServer, name: str
) -> None:
    """Allows two differences. uvicorn rejects invalid HTTP in plain text and does not count it. It
    also sends 100 (Continue) even after the body.
    """
    sent = UNUSUAL_REQUESTS[name]
    responses = comparable(await server.talk(sent))
    expected = comparable(await plain.talk(sent)).replace(CONTINUE, b"")
    expected, uvicorn_rejection, _ = expected.partition(UVICORN_REJECTION)
    await until(
        lambda: (
            Counter(server.outcomes()) - Counter(plain.outcomes())
            == Counter(["INVALID_ARGUMENT"] * bool(uvicorn_rejection))
        )
    )
    if uvicorn_rejection:
        responses, rejection, error = responses.partition(JSON_REJECTION)
        assert rejection
        assert b"\r\nconnection: close\r\n\r\n" in error
        assert b'"message":"not a request of HTTP/1.1: ' in error
    assert responses == expected


@pytest.mark.parametrize(
    "first", [b"\x16\x03\x01\x02", b"GET /embed", b"EHLO client", b"POST /embed HTTPS/1.1"]
)
async def test_connection_without_a_request_line_is_closed_without_a_response(
    server: OurServer, first: bytes
) -> None:
    assert await server.talk(first + b"\r\n\r\n" + post(BODY)) == b""
    assert server.outcomes() == {}
    assert (await server.talk(post(BODY) + CLOSING_REQUEST)).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("count", [1, 2, 3, 10, 30])
async def test_protocol_is_detected_when_the_first_bytes_arrive_alone(
    server: OurServer, plain: PlainServer, count: int
) -> None:
    sent = post(BODY, url="/embed") + CLOSING_REQUEST
    reader, writer = await server.open(sent[:count])
    await until(lambda: server.wire.connections)
    await asyncio.sleep(0.01)  # the rest arrives in another read
    writer.write(sent[count:])
    assert comparable(await reader.read()) == comparable(await plain.talk(sent))


MIXED = [
    post(BODY),
    post(b"{"),
    get("/models"),
    post(OTHER_BODY),
    chunked(BODY),
    post(MISSING_ROW_BODY),
    post(MESSAGE, f"Content-Type: {PROTOBUF}"),
    get("/nothing"),
    post(b""),
]


async def test_request_split_at_any_byte_gets_the_same_response(server: OurServer) -> None:
    reader, writer = await server.open()
    whole = post(BODY)
    writer.write(whole)
    _, _, expected = await read_response(reader)
    for where in range(1, len(whole)):
        for packet in cut(whole, [where]):  # not through the socket, which may join the two
            server.connection.data_received(packet)
        status, _, body = await read_response(reader)
        assert (status, body) == (200, expected)


@settings(
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    requests=st.lists(st.sampled_from(MIXED), min_size=1, max_size=8),
    where=st.lists(st.integers(0, 1500), max_size=12),
)
def test_pipelined_requests_split_at_random_get_the_responses_of_uvicorn(
    engine: FakeEngine,
    executor: ThreadPoolExecutor,
    requests: list[bytes],
    where: list[int],
) -> None:
    sent = b"".join(requests) + CLOSING_REQUEST
    packets = cut(sent, {end for end in where if end < len(sent)})

    async def compare() -> None:
        pipeline = make_pipeline(engine, executor=executor, limits=LIMITS)
        async with OurServer(pipeline) as server, PlainServer(pipeline) as plain:
            responses = await server.talk(*packets)
            assert comparable(responses) == comparable(await plain.talk(sent))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(compare())


@pytest.mark.parametrize("count", [2, 7, 20])
async def test_pipelined_fast_and_slow_requests_are_answered_in_order(
    server: OurServer, plain: PlainServer, count: int
) -> None:
    sent = b"".join(MIXED[i % len(MIXED)] for i in range(count)) + CLOSING_REQUEST
    responses = await server.talk(sent)
    assert comparable(responses) == comparable(await plain.talk(sent))
    assert responses.count(b"HTTP/1.1 ") == count + 1
    assert server.outcomes() == plain.outcomes()


def comparable(responses: bytes) -> bytes:
    """Removes generated request ids, dates, and activation times of versions, which differ."""
    varying = rb'"since":"[^"]*"|x-request-id: [0-9a-f]{32}\r\n|date: [^\r]*\r\n'
    return re.sub(varying, b"", responses)


async def test_rejections_keep_the_request_order_when_reads_are_full(
    server: OurServer, plain: PlainServer
) -> None:
    """Checks rejections that the server writes while it reads, with more input available."""
    sent = (post(b"{") + post(b"[" * 900)) * 600 + CLOSING_REQUEST
    responses = await server.talk(sent)
    assert responses.count(b"HTTP/1.1 400 Bad Request\r\n") == 1200
    assert comparable(responses) == comparable(await plain.talk(sent))
