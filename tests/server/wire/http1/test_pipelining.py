"""Tests of pipelined requests on the fast path: order, metrics, lost clients, and slow readers."""

import asyncio
import json

import pytest
from server.fake_engine import FakeEngine
from server.live import IN_THREAD, PROTOBUF
from server.raw_http import OurServer, get, post, read_response
from server.waiting import until
from server.wire.http1.sample_requests import BODY, CLOSING_REQUEST, LARGE_BODY, OTHER_BODY

from embedserve_proto import embedding_pb2 as pb

LIMITS = IN_THREAD


async def test_pipelined_metrics_request_counts_the_requests_before_it(server: OurServer) -> None:
    reader, _ = await server.open(post(BODY) + post(OTHER_BODY) + get("/metrics") + post(BODY))
    assert [(await read_response(reader))[0] for _ in range(2)] == [200, 200]
    status, _, text = await read_response(reader)
    assert status == 200
    assert b'embedserve_requests_total{outcome="OK",protocol="rest"} 2.0' in text
    assert (await read_response(reader))[0] == 200
    assert server.outcomes() == {"OK": 3}


async def test_buffered_request_start_is_parsed_before_bytes_read_later(
    server: OurServer, engine: FakeEngine
) -> None:
    """Checks that the start of a request stays buffered while the kernel holds its rest."""
    engine.hold()
    reader, writer = await server.open()
    second = post(OTHER_BODY)
    writer.write(post(BODY) + second[:30])
    await until(lambda: engine.lookups and server.connection.is_read_paused)
    writer.write(second[30:] + CLOSING_REQUEST)
    engine.release()
    responses = [await read_response(reader) for _ in range(3)]
    assert [status for status, _, _ in responses] == [200, 200, 200]
    assert len(json.loads(responses[1][2])["values"]) == 2


async def test_buffered_request_of_a_lost_connection_is_not_processed(
    server: OurServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Checks a connection that is lost between a response and the next buffered request."""
    reader, writer = await server.open(post(b"{"))
    await read_response(reader)
    connection = server.connection
    connection.data_received(post(b"{") + post(BODY))
    connection.transport.abort()
    writer.close()
    await until(lambda: not server.http1())
    await asyncio.sleep(0)
    assert server.outcomes() == {"INVALID_ARGUMENT": 2}
    assert caplog.records == []


async def test_request_of_an_aborted_connection_counts_as_cancelled(
    server: OurServer, engine: FakeEngine
) -> None:
    await server.open_held(engine, post(BODY))
    server.connection.abort()  # and its batch ends before the event loop reports the loss
    assert server.outcomes() == {"CANCELLED": 1}
    engine.release()
    await until(lambda: not server.http1())
    assert server.outcomes() == {"CANCELLED": 1}


async def test_unread_responses_pause_the_reading_of_requests(
    server: OurServer, engine: FakeEngine
) -> None:
    """Sends one request after the other, so that none is buffered while another is looked up."""
    reader, writer = await server.open(post(LARGE_BODY))
    await until(lambda: server.outcomes() == {"OK": 1} and server.connection.is_write_paused)
    writer.write(post(LARGE_BODY))
    await until(lambda: server.connection._context or server.connection.is_read_paused)
    assert server.connection._context is None
    assert server.outcomes() == {"OK": 1}
    writer.write(post(LARGE_BODY))
    responses = [await read_response(reader) for _ in range(3)]
    assert [status for status, _, _ in responses] == [200] * 3
    assert len({body for _, _, body in responses}) == 1
    assert len(json.loads(responses[0][2])["values"]) == 2000
    await until(lambda: server.connection.transport.get_write_buffer_size() == 0)


async def test_pipelined_large_responses_reach_a_slow_reader_complete(
    server: OurServer,
) -> None:
    reader, _ = await server.open(
        (post(LARGE_BODY) + post(LARGE_BODY, f"Accept: {PROTOBUF}")) * 3 + CLOSING_REQUEST
    )
    await until(lambda: server.outcomes() and server.connection.is_write_paused)
    assert server.outcomes() == {"OK": 1}
    responses = [await read_response(reader) for _ in range(6)]
    assert len(json.loads(responses[0][2])["values"]) == 2000
    assert pb.EmbedResponse.FromString(responses[1][2]).batch_size == 2000
    assert [body for _, _, body in responses] == [responses[0][2], responses[1][2]] * 3
    assert (await read_response(reader))[0] == 200
    assert await reader.read() == b""
