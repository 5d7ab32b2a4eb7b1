"""Tests of telemetry over every protocol: request ids, which every error has, and timings where
they are enabled."""

import logging
import re
from dataclasses import replace

import pytest
from protocols.drivers import Driver
from protocols.logs import fields_of
from protocols.requests import Request, Response, check_vectors
from protocols.servers import MATRIX, Servers, Setup

from embedserve.metrics import rate_limited_logger

pytestmark = MATRIX

VALID = Request({"user": [[1]], "movie": [[2]], "tag": [[3]]})
INVALID = Request({"user": [[7]], "movie": [[]], "tag": [[]]})
ID = "x-request-id"
GENERATED_ID = re.compile("[0-9a-f]{32}")
ID_CHARACTERS_MAX = 128
STAGES = ["read", "queue", "lookup", "encode"]
SETUP = Setup()
SLOW = Setup(slow_ms=50)
TIMED = Setup(sends_timing=True)
LINES_MAX = 10
"""Maximum number of log lines of one kind in 10 seconds."""


async def request_with(driver: Driver, request: Request, **headers: str) -> Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await driver.request(replace(request, headers=named))


@pytest.fixture(autouse=True)
def skip_grpcio_streams(protocol: str) -> None:
    if protocol == "stream-grpcio":
        pytest.skip("grpcio's streams have no ids")


async def test_request_id_is_echoed_in_the_response(driver: Driver) -> None:
    for request in (VALID, INVALID):
        response = await request_with(driver, request, x_request_id="a7/Z~")
        assert response.headers[ID] == "a7/Z~"


async def test_failed_and_slow_requests_are_logged_with_their_request_id(
    servers: Servers, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    driver = await servers.driver(protocol, SETUP)
    response = await driver.request(VALID)
    check_vectors(response, driver.engine, VALID)
    assert ID not in response.headers
    async with servers.own_server(protocol, SLOW) as driver:
        response = await driver.request(INVALID)
        driver.engine.delay_s = 0.06
        slow = await driver.request(VALID)
    assert GENERATED_ID.fullmatch(response.headers[ID])
    (fields,) = fields_of(caplog, "rejected with INVALID_ARGUMENT: features.user")
    assert fields["request_id"] == response.headers[ID]
    assert [fields[name] for name in ("model", "version", "examples", "ids")] == ["shop", 7, 1, 1]
    assert {"read_ms", "queue_ms", "lookup_ms", "total_ms"} <= fields.keys()
    (fields,) = [one for one in fields_of(caplog, "slow request") if one["outcome"] == "OK"]
    assert slow.headers[ID] == fields["request_id"]
    assert fields["lookup_ms"] >= 60
    stages = [fields[f"{name}_ms"] for name in (*STAGES, "write")]
    assert sum(stages) == pytest.approx(fields["total_ms"], abs=0.01)


async def test_unusable_request_id_is_replaced(
    servers: Servers,
    protocol: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rate_limited_logger, "PERIOD_S", 3600.0)  # longer than any test
    async with servers.own_server(protocol, SETUP) as driver, driver.connect() as connection:
        for unusable in ["x" * (ID_CHARACTERS_MAX + 1), "two words"] * LINES_MAX:
            request = replace(VALID, headers={ID: unusable})
            response = await driver.request(request, connection)
            check_vectors(response, driver.engine, VALID)
            assert GENERATED_ID.fullmatch(response.headers[ID])
    lines = [one for one in caplog.messages if one.startswith("x-request-id is not used: ")]
    assert 1 <= len(lines) <= LINES_MAX


async def test_responses_have_server_timings_if_enabled(servers: Servers, protocol: str) -> None:
    """A stream has no timings, because it has one end and many requests."""
    driver = await servers.driver(protocol, TIMED)
    for request in (VALID, INVALID):
        response = await driver.request(request)
        if driver.protocol.is_stream:
            assert "server-timing" not in response.headers
            continue
        timings = response.headers["server-timing"]
        parts = dict(part.split(";dur=") for part in timings.split(", "))
        assert list(parts) == [*(STAGES if request is VALID else STAGES[:3]), "total"]
        assert sum(map(float, parts.values())) == pytest.approx(2 * float(parts["total"]), abs=0.01)
