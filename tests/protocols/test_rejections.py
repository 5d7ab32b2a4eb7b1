"""Tests of rejections over every protocol: the expected code or status, field and words. The
request is counted once, and its connection keeps working."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
from protocols.drivers import Driver
from protocols.formats import CODES
from protocols.requests import EncodedRequest, Request, Response, check_vectors
from protocols.servers import MATRIX, Servers, Setup
from server.fake_engine import Bags
from server.fake_models import ruled_info, unpooled_info

from embedserve.config import Limits

pytestmark = MATRIX

VALID = Request({"user": [[1], [2]], "movie": [[3], []], "tag": [[], [4]]})
SETUP = Setup()
RULED = Setup([ruled_info()])
SEQUENCE = Setup([unpooled_info()])


@dataclass(frozen=True)
class Rejection:
    """An expected error.

    Attributes:
        status: HTTP status.
        field: field that the error names; None if it depends on the protocol.
        words: part of the message.
        needs: options that the protocol must have.
    """

    status: int
    field: str | None
    words: str
    needs: Sequence[str] = ()


def check_rejection(driver: Driver, response: Response, expected: Rejection) -> None:
    assert response.code == CODES[expected.status], response
    if response.status is not None:
        assert response.status == expected.status
    assert expected.words in response.message
    is_inference = driver.name.startswith(("infer", "shared-memory"))  # fields are tensors there
    if expected.field is not None and not is_inference:
        assert response.field == expected.field
    if driver.name != "stream-grpcio":
        assert len(response.headers["x-request-id"]) == 32


async def check_rejected(
    driver: Driver, invalid: Request | EncodedRequest, expected: Rejection
) -> None:
    """Checks that the invalid request is rejected and counted once. Valid requests on its
    connection, before, after and beside it, get responses."""
    before = driver.outcomes()
    async with driver.connect() as connection:
        sent = invalid if isinstance(invalid, EncodedRequest) else await driver.encode(invalid)
        valid = [await driver.encode(VALID) for _ in range(3)]
        exchanges = connection.start(valid[0], sent, valid[1])
        first, rejected, second = [await driver.read(one) for one in exchanges]
        check_rejection(driver, rejected, expected)
        third = await driver.request_raw(valid[2], connection)
        for response in (first, second, third):
            check_vectors(response, driver.engine, VALID)
    code = CODES[expected.status]
    after = driver.outcomes()
    assert after.pop(code) == before.pop(code, 0) + 1
    assert after.pop("OK") == before.pop("OK", 0) + 3
    assert after == before


NAMED = ("model",)
INVALID: Mapping[str, tuple[Request, Rejection]] = {
    "unknown model": (
        replace(VALID, model="shoes"),
        Rejection(404, "model", "model is 'shoes': this server has shop, ruled, sequence", NAMED),
    ),
    "unknown model that cannot be printed": (
        replace(VALID, model='a"<|>\u00e9'),
        Rejection(404, "model", "model is 'a\"<|>\u00e9'", NAMED),
    ),
    "unknown version": (
        replace(VALID, model="shop", version="9"),
        Rejection(404, None, "9", ("version",)),
    ),
    "unknown alias": (
        replace(VALID, model="shop@canary"),
        Rejection(404, None, "canary", NAMED),
    ),
    "unknown feature": (
        Request({"user": [[1]], "actor": [[1]]}),
        Rejection(400, "features.actor", "model 'shop' has no such feature", NAMED),
    ),
    "unknown feature in another script": (
        Request({"user": [[1]], "映画 50%": [[1]]}),
        Rejection(400, "features.映画 50%", "model 'shop' has no such feature", NAMED),
    ),
    "id past the table": (
        Request({"user": [[0], [1, 7]], "movie": [[], []], "tag": [[], []]}),
        Rejection(400, "features.user[1][1]", "is 7: ids of 'user' are row numbers from 0 to 6"),
    ),
    "id below zero": (
        Request({"user": [[0], [-1]], "movie": [[], []], "tag": [[], []]}),
        Rejection(400, "features.user[1][0]", "is -1: ids of 'user' are row numbers from 0 to 6"),
    ),
    "string that is no integer": (
        Request({"user": [["1"], ["abc"]]}),
        Rejection(400, "features.user[1][0]", "is 'abc'", ("strings",)),
    ),
    "weight that is not finite": (
        Request(VALID.bags, {"tag": [[], [float("nan")]]}),
        Rejection(400, "weights.tag[1][0]", "weights are finite", ("NaN",)),
    ),
    "two weights for one id": (
        Request(VALID.bags, {"tag": [[], [0.5, 2.0]]}),
        Rejection(400, None, "weights"),
    ),
    "unknown key": (
        replace(VALID, output_keys=["user", "film"]),
        Rejection(400, "output_keys[1]", "[1] is 'film': model 'shop' has no such key", ("keys",)),
    ),
    "key named twice": (
        replace(VALID, output_keys=["user", "user"]),
        Rejection(400, "output_keys", "names 'user' twice", ("keys",)),
    ),
}


@pytest.mark.parametrize("name", INVALID)
async def test_invalid_request_is_rejected_without_affecting_other_requests(
    driver: Driver, name: str
) -> None:
    invalid, expected = INVALID[name]
    if not driver.can(*expected.needs):
        pytest.skip("such a request cannot be sent")
    await check_rejected(driver, invalid, expected)


async def test_ids_missing_from_a_vocabulary_are_rejected(servers: Servers, protocol: str) -> None:
    driver = await servers.driver(protocol, RULED)
    bags: Bags = {name: [[]] for name in driver.engine.model.features} | {"shelf": [[100, -1]]}
    response = await driver.request(Request(bags))
    words = "is -1: not one of the 3 ids of 'shelf'"
    check_rejection(driver, response, Rejection(400, "features.shelf[0][1]", words))


async def test_integer_id_of_a_string_feature_is_rejected(servers: Servers, protocol: str) -> None:
    driver = await servers.driver(protocol, RULED)
    bags: Bags = {name: [[], []] for name in driver.engine.model.features} | {"tag": [[], [7]]}
    expected = Rejection(400, "features.tag[1][0]", "is 7: ids of 'tag' are strings")
    check_rejection(driver, await driver.request(Request(bags)), expected)


async def test_weights_for_an_unpooled_model_are_rejected(servers: Servers, protocol: str) -> None:
    driver = await servers.driver(protocol, SEQUENCE)
    bags: Bags = {name: [[1]] for name in driver.engine.model.features}
    bags["tag"] = [[]]
    request = Request(
        bags, {"tag": [[]]} if protocol.startswith("predictor") else {"item": [[1.0]]}
    )
    response = await driver.request(request)
    check_rejection(driver, response, Rejection(400, None, "weights"))


async def test_malformed_message_is_rejected(driver: Driver) -> None:
    valid = await driver.encode(VALID)
    await check_rejected(
        driver, replace(valid, body=driver.format.not_a_message), Rejection(400, None, "body")
    )


async def test_non_integer_ids_are_rejected(driver: Driver) -> None:
    body, words = driver.format.wrong_type
    if not body:
        pytest.skip("its fields have one type")
    valid = await driver.encode(VALID)
    invalid = replace(valid, body=body, headers=dict(valid.headers))
    if driver.name.startswith("infer-binary"):
        invalid = replace(invalid, headers={"inference-header-content-length": f"{len(body)}"})
    await check_rejected(driver, invalid, Rejection(400, None, words))


async def test_empty_body_is_rejected(driver: Driver) -> None:
    valid = await driver.encode(VALID)
    await check_rejected(driver, replace(valid, body=b""), Rejection(400, None, ""))


BODY_MAX, TEXT_MAX = 20_000, 18_000
LIMITED = Setup(
    limits=Limits(
        body_bytes_max=BODY_MAX,
        request_text_bytes_max=TEXT_MAX,
        request_examples_max=8,
        request_ids_max=20,
        request_features_max=3,
    )
)
EXACT = Setup(limits=Limits(body_bytes_max=BODY_MAX, request_text_bytes_max=BODY_MAX))
NARROW = Setup(limits=Limits(request_output_bytes_max=100))
LARGE: Mapping[str, tuple[Setup, Request, Rejection]] = {
    "examples": (
        LIMITED,
        Request({"user": [[1]] * 9, "movie": [[]] * 9, "tag": [[]] * 9}),
        Rejection(413, None, "the limit is 8 (--request-examples-max)"),
    ),
    "ids": (
        LIMITED,
        Request({"user": [[1] * 21], "movie": [[]], "tag": [[]]}),
        Rejection(413, None, "the limit is 20 (--request-ids-max)"),
    ),
    "features": (
        LIMITED,
        Request({"user": [[1]], "movie": [[]], "tag": [[]], "more": [[]]}),
        Rejection(413, None, "the limit is 3 (--request-features-max)", NAMED),
    ),
    "keys": (
        LIMITED,
        replace(VALID, output_keys=["user"] * 4),
        Rejection(413, "output_keys", "the limit is 3 (--request-features-max)", ("keys",)),
    ),
    "vectors": (
        NARROW,
        Request({"user": [[1]] * 3, "movie": [[]] * 3, "tag": [[]] * 3}),
        Rejection(413, None, "the limit is 100 (--request-output-bytes-max)"),
    ),
}


@pytest.mark.parametrize("name", LARGE)
async def test_request_over_a_limit_is_rejected_without_affecting_other_requests(
    servers: Servers, protocol: str, name: str
) -> None:
    setup, invalid, expected = LARGE[name]
    driver = await servers.driver(protocol, setup)
    if not driver.can(*expected.needs):
        pytest.skip("such a request cannot be sent")
    await check_rejected(driver, invalid, expected)


def limit_of(driver: Driver) -> str:
    """Returns a pattern of the limit of bodies in messages; JSON text has a limit of its own."""
    if driver.format.is_text:
        return rf"{TEXT_MAX} \(--request-text-bytes-max\)"
    return rf"{BODY_MAX} \(--body-bytes-max\)"


@pytest.mark.parametrize("excess", [1, 100_000])
async def test_body_over_the_limit_is_rejected(
    servers: Servers, protocol: str, excess: int
) -> None:
    """Checks it for a declared and for a counted length. A stream ends with such a body."""
    driver = await servers.driver(protocol, LIMITED)
    valid = await driver.encode(VALID)
    before = driver.outcomes().get("RESOURCE_EXHAUSTED", 0)
    body = valid.body.ljust(BODY_MAX + excess)
    response = await driver.request_raw(replace(valid, body=body))
    assert response.code == "RESOURCE_EXHAUSTED"
    if driver.protocol.grpc_server == "native":
        expected = Rejection(413, None, f"{len(body)}")
        if not driver.protocol.is_grpc:
            is_declared = driver.is_http1 and not driver.protocol.is_chunked
            expected = Rejection(413, "body", f"body has {len(body)} bytes" if is_declared else "")
            pattern = rf"body has (at least )?\d+ bytes, the limit is {limit_of(driver)}"
            assert re.fullmatch(pattern, response.message)
        check_rejection(driver, response, expected)
        assert driver.outcomes()["RESOURCE_EXHAUSTED"] == before + 1
    check_vectors(await driver.request(VALID), driver.engine, VALID)


async def test_body_over_the_limit_is_rejected_before_its_end(
    servers: Servers, protocol: str
) -> None:
    driver = await servers.driver(protocol, LIMITED)
    if driver.protocol.grpc_server != "native":
        pytest.skip("grpcio reads it to its end")
    body = (await driver.encode(VALID)).body.ljust(1_000_000)
    async with driver.connect() as connection:
        exchange = connection.begin(replace(await driver.encode(VALID), body=body))
        sent = connection.frame(body)
        exchange.write(sent[:15_000])
        await asyncio.sleep(0.02)  # so that the server reads the rest separately
        exchange.write(sent[15_000 : BODY_MAX + 6])
        response = await driver.read(exchange)
    assert response.code == "RESOURCE_EXHAUSTED"


async def test_body_of_exactly_the_limit_is_accepted(servers: Servers, protocol: str) -> None:
    driver = await servers.driver(protocol, EXACT)
    valid = await driver.encode(VALID)
    if driver.format.is_text:
        body = valid.body.ljust(BODY_MAX)
    elif driver.protocol.is_grpc or protocol.startswith("protobuf"):
        # an unknown field of ``size`` bytes
        size = BODY_MAX - len(valid.body) - 5
        body = valid.body + b"\xa2\x06" + encoded_varint(size) + bytes(size)
        assert len(body) == BODY_MAX
    else:
        pytest.skip("the body has no room for more")
    check_vectors(await driver.request_raw(replace(valid, body=body)), driver.engine, VALID)


def encoded_varint(size: int) -> bytes:
    """Returns a number as a varint of three bytes."""
    return bytes([size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14])
