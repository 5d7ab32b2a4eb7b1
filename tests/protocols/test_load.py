"""Tests of load over every protocol: requests that wait, expire, exceed limits, are cancelled or
drained."""

import asyncio

import pytest
from protocols.drivers import Driver
from protocols.requests import Request, check_vectors
from protocols.servers import MATRIX, Servers, Setup
from server.fake_models import model_info
from server.waiting import until

from embedserve.config import Limits

pytestmark = MATRIX

FIRST = Request({"user": [[1]], "movie": [[2]], "tag": [[3]]})
SECOND = Request({"user": [[4]], "movie": [[5]], "tag": [[]]})
THIRD = Request({"user": [[6]], "movie": [[]], "tag": [[4]]})
INVALID = Request({"user": [[7]], "movie": [[]], "tag": [[]]})
SETUP = Setup(limits=Limits(inline_bytes_max=0))
NARROW = Setup([model_info()], Limits(inline_bytes_max=0, queue_examples_max=1))


async def test_requests_in_flight_share_a_batch(driver: Driver) -> None:
    """Sends them over one connection. Over HTTP/1.1 each has its own, because responses come one at
    a time there. An invalid request is rejected alone."""
    requests = [SECOND, INVALID, THIRD, SECOND]
    async with driver.connect() as busy, driver.connect() as one, driver.connect() as two:
        async with driver.looking_up(busy, FIRST) as first:
            if driver.is_http1:
                exchanges = await driver.start(one, *requests[:1])
                exchanges += await driver.start(two, *requests[1:2])
                waiting = 2
            else:
                exchanges = await driver.start(one, *requests)
                waiting = 4
            await until(lambda: driver.live.queued() == waiting)
        check_vectors(await driver.read(first), driver.engine, FIRST)
        responses = [await driver.read(exchange) for exchange in exchanges]
    for request, response in zip(requests, responses, strict=False):
        if request is INVALID:
            assert (response.code, "features.user[0][0] is 7" in response.message) == (
                "INVALID_ARGUMENT",
                True,
            )
        else:
            check_vectors(response, driver.engine, request)
    assert [one.batch_size for one in driver.engine.lookups] == [1, len(responses) - 1]


async def test_full_queue_rejects_with_retry_after(servers: Servers, protocol: str) -> None:
    driver = await servers.driver(protocol, NARROW)
    before, is_native = driver.outcomes(), driver.protocol.grpc_server == "native"
    is_early = is_native and not (driver.is_http1 or driver.protocol.is_stream)
    async with driver.connect() as one, driver.connect() as two:
        async with driver.looking_up(one, FIRST) as first:
            (second,) = await driver.start(two, SECOND)
            await until(lambda: driver.live.queued() == 1)
            rejected = await driver.request(THIRD)
            if is_early:  # without a body
                exchange = two.begin(await driver.encode(THIRD))
                assert (await driver.read(exchange)).code == rejected.code
        assert rejected.code == "RESOURCE_EXHAUSTED"
        assert rejected.status == driver.http_status(429)
        if not driver.protocol.is_stream:
            assert rejected.headers["retry-after"] == "1"
        check_vectors(await driver.read(first), driver.engine, FIRST)
        check_vectors(await driver.read(second), driver.engine, SECOND)
    check_vectors(await driver.request(THIRD), driver.engine, THIRD)
    driver.expect_more(before, OK=3, RESOURCE_EXHAUSTED=1 + is_early)


async def test_request_that_expires_in_the_queue_is_not_looked_up(driver: Driver) -> None:
    before = driver.outcomes()
    late = Request(SECOND.bags, timeout_s=0.2)
    async with driver.connect() as one, driver.connect() as two:
        async with driver.looking_up(one, FIRST) as first:
            (second,) = await driver.start(two, late)
            answer = asyncio.create_task(driver.read(second))
            # On a slow machine the deadline may pass before the request is queued.
            await until(lambda: driver.live.queued() == 1 or answer.done())
            await asyncio.sleep(0.25)
        check_vectors(await driver.read(first), driver.engine, FIRST)
        response = await answer
    assert response.code == "DEADLINE_EXCEEDED"
    assert response.status == driver.http_status(504)
    assert len(driver.engine.lookups) == 1
    if driver.protocol.grpc_server == "native":
        await until(lambda: driver.has_more(before, OK=1, DEADLINE_EXCEEDED=1))


async def test_expired_deadline_is_rejected_without_a_lookup(driver: Driver) -> None:
    if driver.name == "stream-grpcio":
        pytest.skip("grpcio ends such a stream before its first message")
    late = Request(FIRST.bags, timeout_s=1e-6)
    if driver.protocol.grpc_server == "grpcio":  # its deadline is 1 to 2 ms
        driver.engine.hold()
        assert (await driver.request(late)).code == "DEADLINE_EXCEEDED"
        driver.engine.release()
        return
    driver.engine.lookups.clear()
    assert (await driver.request(late)).code == "DEADLINE_EXCEEDED"
    assert driver.engine.lookups == []


async def test_request_with_a_distant_deadline_succeeds(driver: Driver) -> None:
    request = Request(FIRST.bags, timeout_s=50)
    check_vectors(await driver.request(request), driver.engine, request)


async def test_request_of_a_disconnected_client_leaves_the_queue(driver: Driver) -> None:
    before = driver.outcomes()
    async with driver.connect() as one, driver.connect() as two:
        async with driver.looking_up(one, FIRST) as first:
            (second,) = await driver.start(two, SECOND)
            await until(lambda: driver.live.queued() == 1)
            second.cancel()
            await until(lambda: driver.has_more(before, CANCELLED=1))
        check_vectors(await driver.read(first), driver.engine, FIRST)
    check_vectors(await driver.request(THIRD), driver.engine, THIRD)
    assert [one.batch_size for one in driver.engine.lookups] == [1, 1]
    driver.expect_more(before, OK=2, CANCELLED=1)


async def test_client_that_disconnects_during_its_lookup_is_counted_as_cancelled(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    before = driver.outcomes()
    async with driver.connect() as connection, driver.looking_up(connection, FIRST) as first:
        first.cancel()
        await until(lambda: driver.has_more(before, CANCELLED=1))
    check_vectors(await driver.request(THIRD), driver.engine, THIRD)
    driver.expect_more(before, OK=1, CANCELLED=1)
    assert [one for one in caplog.records if one.levelname != "INFO"] == []


async def test_accepted_request_is_completed_during_a_drain(
    servers: Servers, protocol: str
) -> None:
    async with servers.own_server(protocol, SETUP) as driver:
        late = await driver.encode(SECOND)
        async with driver.connect() as connection:
            async with driver.looking_up(connection, FIRST) as first:
                driver.live.stop.set()
                await until(lambda: driver.live.pipeline.models.not_ready)
            check_vectors(await driver.read(first), driver.engine, FIRST)
            assert connection.is_closed == driver.is_http1  # HTTP/2 has GOAWAY
        await driver.live.running
        with pytest.raises(ConnectionError):
            await driver.request_raw(late)


async def test_failed_lookup_does_not_reveal_its_exception(
    servers: Servers, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the error in full. It is limited in rate, so each test has its own server."""
    async with servers.own_server(protocol, SETUP) as driver:
        driver.engine.failure = ZeroDivisionError("secret of the server")
        response = await driver.request(FIRST)
        assert (response.code, response.status) == ("INTERNAL", driver.http_status(500))
        assert "secret" not in response.message
        assert "retry-after" not in response.headers
        assert "ZeroDivisionError: secret of the server" in caplog.text
        driver.engine.failure = None
        check_vectors(await driver.request(FIRST), driver.engine, FIRST)
        assert driver.outcomes() == {"OK": 1, "INTERNAL": 1}
