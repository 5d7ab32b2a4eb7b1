"""Tests of connections: many requests, a slow body, an aborted body, unread responses."""

import asyncio
from dataclasses import replace

import pytest
from h2.errors import ErrorCodes
from protocols.connections import Http1Connection
from protocols.drivers import Driver
from protocols.requests import Request, check_vectors
from protocols.servers import MATRIX, Servers, Setup
from server.waiting import until

from embedserve.config import Limits

pytestmark = MATRIX

SETUP = Setup()
IN_THREAD = Setup(limits=Limits(inline_bytes_max=0))


def request_for(number: int) -> Request:
    """Returns a request; its vectors and its length depend on ``number``."""
    return Request(
        {
            "user": [[number % 7] * (number % 5)],
            "movie": [[number % 11, (number + 3) % 11]],
            "tag": [[]] if number % 3 else [[number % 5]],
        }
    )


@pytest.mark.parametrize("setup", [SETUP, IN_THREAD], ids=["inline", "in a thread"])
async def test_each_request_in_flight_gets_its_own_vectors(
    servers: Servers, protocol: str, setup: Setup
) -> None:
    driver = await servers.driver(protocol, setup)
    requests = [request_for(number) for number in range(25)]
    async with driver.connect() as connection:
        exchanges = await driver.start(connection, *requests)
        for request, exchange in zip(requests, exchanges, strict=True):
            check_vectors(await driver.read(exchange), driver.engine, request)


@pytest.mark.parametrize("size", [1, 7, 100])
async def test_body_sent_in_chunks_is_reassembled(driver: Driver, size: int) -> None:
    request = request_for(3)
    async with driver.connect() as connection:
        sent = await driver.encode(request)
        exchange = connection.begin(sent)
        body = connection.frame(sent.body)
        for at in range(0, len(body), size):
            exchange.write(body[at : at + size], is_end=at + size >= len(body))
            await asyncio.sleep(0)
        check_vectors(await driver.read(exchange), driver.engine, request)
        check_vectors(
            await driver.request(request_for(4), connection), driver.engine, request_for(4)
        )


async def test_client_that_disconnects_during_its_body_is_counted_as_cancelled(
    driver: Driver,
) -> None:
    if driver.protocol.is_stream or driver.protocol.grpc_server != "native":
        pytest.skip("no request has begun, or grpcio has its own parser")
    before = driver.outcomes()
    async with driver.connect() as connection:
        sent = await driver.encode(request_for(3))
        exchange = connection.begin(sent)
        exchange.write(connection.frame(sent.body)[:-2])
        exchange.cancel()
        await until(lambda: driver.has_more(before, CANCELLED=1))
    check_vectors(await driver.request(request_for(1)), driver.engine, request_for(1))


async def test_body_shorter_than_declared_is_rejected(driver: Driver) -> None:
    """Covers gRPC, whose messages have a length prefix, and HTTP/2, whose content-length is
    checked."""
    if driver.is_http1 or driver.protocol.grpc_server != "native":
        pytest.skip("HTTP/1 waits for the rest, and grpcio has its own parser")
    sent = await driver.encode(request_for(3))
    body = sent.body
    if driver.protocol.is_grpc:
        body = b"\0" + (len(body) + 1).to_bytes(4) + body
    else:
        sent = replace(sent, headers={**sent.headers, "content-length": str(len(body) + 1)})
    async with driver.connect() as connection:
        exchange = connection.begin(sent)
        exchange.write(body, is_end=True)
        raw = await exchange.response()
    assert raw.status != 200 or raw.headers["grpc-status"] != "0"
    check_vectors(await driver.request(request_for(1)), driver.engine, request_for(1))


@pytest.mark.parametrize("number", [1, 3])
async def test_bytes_after_an_http1_body_begin_the_next_request(
    driver: Driver, number: int
) -> None:
    if not driver.is_http1:
        pytest.skip("not HTTP/1")
    request, before = request_for(number), driver.outcomes()
    for _ in range(3):  # from the second connection on, the form of the headers is known
        async with driver.connect() as connection:
            assert isinstance(connection, Http1Connection)
            sent = await driver.encode(request)
            exchange = connection.begin(sent)
            exchange.write(sent.body, is_end=True)
            connection.writer.write(b"surplus")  # arrives together with the body
            check_vectors(await driver.read(exchange), driver.engine, request)
            rejected = await connection.request(sent)
            assert rejected.status == 400
            assert b"not a request of HTTP/1.1" in rejected.body
    driver.expect_more(before, OK=3, INVALID_ARGUMENT=3)


@pytest.mark.parametrize("is_end", [True, False], ids=["with its end", "before its end"])
async def test_body_longer_than_declared_is_rejected(driver: Driver, is_end: bool) -> None:
    """Covers gRPC, whose unary calls have one message, and HTTP/2, which resets the stream."""
    if driver.is_http1 or driver.protocol.is_stream or driver.protocol.grpc_server != "native":
        pytest.skip("the next request or message begins there, and grpcio has its own parser")
    if driver.protocol.is_grpc and not is_end:
        pytest.skip("the server counts the messages once the client has sent the last one")
    sent, before = await driver.encode(request_for(3)), driver.outcomes()
    if not driver.protocol.is_grpc:
        sent = replace(sent, headers={**sent.headers, "content-length": str(len(sent.body))})
    async with driver.connect() as connection:
        for _ in range(3):  # the headers of the last request are cached
            exchange = connection.begin(sent)
            exchange.write(connection.frame(sent.body) + b"surplus", is_end=is_end)
            rejected = await exchange.response()
            if driver.protocol.is_grpc:
                assert rejected.headers["grpc-status"] == "12"
            else:
                assert rejected.reset == ErrorCodes.PROTOCOL_ERROR
        outcome = "UNIMPLEMENTED" if driver.protocol.is_grpc else "CANCELLED"
        driver.expect_more(before, **{outcome: 3})
        response = await driver.request(request_for(1), connection)
        check_vectors(response, driver.engine, request_for(1))
