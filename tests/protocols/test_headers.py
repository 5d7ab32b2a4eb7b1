"""Tests of HTTP headers over every protocol, including the headers that proxies add."""

import json
import logging
from dataclasses import replace

import pytest
from protocols.drivers import PROTOCOLS, Driver
from protocols.logs import fields_of
from protocols.requests import Request, check_vectors
from protocols.servers import MATRIX, Servers, Setup

pytestmark = MATRIX

VALID = Request({"user": [[1]], "movie": [[2]], "tag": [[3]]})
INVALID = Request({"user": [[7]], "movie": [[]], "tag": [[]]})
SETUP = Setup()
PROXIED = Setup(trusted_proxies=["127.0.0.1", "10.0.0.0/8"])
REST = [name for name, row in PROTOCOLS.items() if not row.is_grpc]
FORGED = "198.51.100.9"
CLIENT = "192.0.2.7"
REJECTED = {
    **{("x-timeout-ms", value): 400 for value in ("soon", "0", "-5", "nan", "inf", "1,5")},
    ("content-encoding", "gzip"): 415,
    ("content-encoding", "br"): 415,
}


@pytest.mark.parametrize("protocol", REST)
@pytest.mark.parametrize(("name", "value"), REJECTED)
async def test_invalid_header_is_rejected_with_its_name_and_value(
    driver: Driver, name: str, value: str
) -> None:
    before = driver.outcomes()
    async with driver.connect() as connection:
        raw = await connection.request(await driver.encode(replace(VALID, headers={name: value})))
    assert raw.status == REJECTED[name, value]
    error = json.loads(raw.body)["error"]
    shown = name.title()
    if driver.format.has_field:
        assert error["field"] == shown
        error = error["message"]
    assert f"{shown} is {value!r}" in error
    driver.expect_more(before, INVALID_ARGUMENT=1)


@pytest.mark.parametrize("protocol", REST)
@pytest.mark.parametrize(
    ("name", "value"), [("content-encoding", "identity"), ("x-timeout-ms", "25000.5")]
)
async def test_identity_encoding_and_valid_timeout_headers_are_accepted(
    driver: Driver, name: str, value: str
) -> None:
    request = replace(VALID, headers={name: value})
    async with driver.connect() as connection:
        for _ in range(2):
            check_vectors(await driver.request(request, connection), driver.engine, request)


async def test_rejected_request_is_logged_with_the_client_address(
    servers: Servers, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that is no trusted proxy cannot set another address."""
    caplog.set_level(logging.INFO)
    forged = {"x-forwarded-for": FORGED, "forwarded": f"for={FORGED}"}
    async with servers.own_server(protocol, SETUP) as driver:
        await driver.request(replace(INVALID, headers=forged))
    (fields,) = fields_of(caplog, "rejected with INVALID_ARGUMENT")
    assert fields["address"] == "127.0.0.1"


async def test_client_address_of_a_trusted_proxy_is_logged(
    servers: Servers, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with servers.own_server(protocol, PROXIED) as driver:
        for headers in (
            {"x-forwarded-for": f"{FORGED}, {CLIENT}, 10.1.1.1"},
            {"forwarded": f"for={CLIENT};proto=https"},
        ):
            await driver.request(replace(INVALID, headers=headers))
    logged_addresses = [
        fields["address"] for fields in fields_of(caplog, "rejected with INVALID_ARGUMENT")
    ]
    assert logged_addresses == [CLIENT, CLIENT]
