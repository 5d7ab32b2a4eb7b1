"""Tests of access over every protocol: tokens are required, and their limits hold."""

import re
from dataclasses import replace

import pytest
from protocols.drivers import PROTOCOLS, Driver
from protocols.requests import Request, Response, check_vectors
from protocols.servers import MATRIX, Setup
from server.fake_models import model_info
from server.waiting import until

from embedserve.config import Limits

pytestmark = MATRIX

VALID = Request({"user": [[1]], "movie": [[2]], "tag": [[3]]})
SETUP = Setup(
    [model_info(), model_info("films")],
    Limits(inline_bytes_max=0, body_bytes_max=20_000),
    {
        "es_right": {},
        "es_shop": {"models": ["shop"]},
        "es_films": {"models": ["films"]},
        "es_late": {"expires": "2020-01-01"},
        "es_lost": {"revoked": True},
        "es_boss": {"roles": ["admin"]},
        "es_one": {"concurrent": 1},
        **{f"es_slow-{name}": {"requests_per_second": 0.01} for name in PROTOCOLS},
    },
)
REJECTED = {
    "": ("UNAUTHENTICATED", 401),
    "Bearer es_unknown": ("UNAUTHENTICATED", 401),
    "Bearer hunter2": ("UNAUTHENTICATED", 401),
    "Basic es_right": ("UNAUTHENTICATED", 401),
    "es_right": ("UNAUTHENTICATED", 401),
    "Bearer es_late": ("UNAUTHENTICATED", 401),
    "Bearer es_lost": ("UNAUTHENTICATED", 401),
    "Bearer es_boss": ("PERMISSION_DENIED", 403),
    "Bearer es_films": ("PERMISSION_DENIED", 403),
}


@pytest.fixture(autouse=True)
def skip_grpcio(protocol: str) -> None:
    if PROTOCOLS[protocol].grpc_server != "native":
        pytest.skip("serve takes no tokens with --grpc-server grpcio")


def with_token(request: Request, authorization: str) -> Request:
    headers = {"authorization": authorization} if authorization else {}
    return replace(request, headers=headers)


def check_code(driver: Driver, response: Response, code: str, status: int) -> None:
    assert (response.code, response.status) == (code, driver.http_status(status))
    is_rest = not driver.protocol.is_grpc
    assert ("www-authenticate" in response.headers) == (is_rest and status == 401)


async def test_caller_without_a_valid_token_is_rejected(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    """Also checks that the next caller on the same connection gets a response, and that neither a
    message nor a log has a token."""
    caplog.set_level("DEBUG", "embedserve")
    valid = with_token(VALID, "Bearer es_right")
    async with driver.connect() as connection:
        for authorization, (code, status) in [*REJECTED.items()] * 2:
            before = driver.outcomes()
            response = await driver.request(with_token(VALID, authorization), connection)
            driver.expect_more(before, **{code: 1})
            assert (authorization, response.code) == (authorization, code)
            check_code(driver, response, code, status)
            assert "x-request-id" in response.headers
            assert not re.search("es_|hunter2", str(response))
            check_vectors(await driver.request(valid, connection), driver.engine, valid)
    assert not re.search("es_|hunter2", caplog.text)


async def test_forbidden_model_is_rejected_whether_or_not_it_exists(driver: Driver) -> None:
    if not driver.can("model"):
        pytest.skip("requests name no model")
    for name, code in {
        "shop": "OK",
        "films": "PERMISSION_DENIED",
        "none": "PERMISSION_DENIED",
    }.items():
        response = await driver.request(with_token(replace(VALID, model=name), "Bearer es_shop"))
        assert (name, response.code) == (name, code)


async def test_caller_over_its_rate_limit_gets_retry_after(driver: Driver) -> None:
    if driver.name.startswith("shared-memory"):
        pytest.skip("registering a region is a request of its rate")
    limited, valid = (
        with_token(VALID, f"Bearer es_slow-{driver.name}"),
        with_token(VALID, "Bearer es_right"),
    )
    check_vectors(await driver.request(limited), driver.engine, limited)
    before = driver.outcomes()
    response = await driver.request(limited)
    check_code(driver, response, "RESOURCE_EXHAUSTED", 429)
    if not driver.protocol.is_stream:
        assert response.headers["retry-after"] == "60"
    check_vectors(await driver.request(valid), driver.engine, valid)
    driver.expect_more(before, OK=1, RESOURCE_EXHAUSTED=1)


async def test_caller_over_its_concurrency_limit_is_rejected(driver: Driver) -> None:
    one = with_token(VALID, "Bearer es_one")
    async with driver.connect() as connection:
        async with driver.looking_up(connection, one) as first:
            response = await driver.request(one)
        check_code(driver, response, "RESOURCE_EXHAUSTED", 429)
        check_vectors(await driver.read(first), driver.engine, one)
        check_vectors(await driver.request(one), driver.engine, one)


async def test_cancelled_request_frees_the_concurrency_limit(driver: Driver) -> None:
    one, before = with_token(VALID, "Bearer es_one"), driver.outcomes()
    async with driver.connect() as connection, driver.looking_up(connection, one) as first:
        first.cancel()
        await until(lambda: driver.has_more(before, CANCELLED=1))
    check_vectors(await driver.request(one), driver.engine, one)


async def test_unauthenticated_client_is_rejected_before_its_body_arrives(driver: Driver) -> None:
    sent = await driver.encode(VALID)
    async with driver.connect() as connection:
        exchange = connection.begin(replace(sent, body=bytes(10_000)))
        exchange.write(connection.frame(bytes(10_000))[:100])
        response = await driver.read(exchange)
        check_code(driver, response, "UNAUTHENTICATED", 401)
