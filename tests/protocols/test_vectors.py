"""Tests that vectors are the oracle's, bit by bit, over every protocol."""

from dataclasses import replace

import numpy as np
import pytest
from protocols.drivers import Driver
from protocols.requests import Request, check_vectors
from protocols.servers import MATRIX, Servers, Setup
from server.fake_engine import Bags
from server.fake_models import model_info, ruled_info, unpooled_info

pytestmark = MATRIX

BAGS: Bags = {"user": [[4], [], [6]], "movie": [[], [10, 10], []], "tag": [[1], [2, 3], []]}
PLAIN = Request(BAGS)
SETUP = Setup()
RULED = Setup([ruled_info()])
SEQUENCE = Setup([unpooled_info()])


def versions() -> Setup:
    """Returns a setup with two versions of one model."""
    infos = []
    for alias, number in (("stable", 7), ("canary", 8)):
        info = model_info()
        manifest = replace(info.manifest, version=number)
        infos.append(replace(info, manifest=manifest, served_name=f"shop@{alias}"))
    return Setup(infos)


VERSIONS = versions()
REQUESTS = {
    "several examples": PLAIN,
    "one example": Request({feature: bags[:1] for feature, bags in BAGS.items()}),
    "features in another order": Request({"tag": BAGS["tag"], "user": BAGS["user"]}),
    "one feature": Request({"movie": [[0], [1, 2, 3]]}),
    "bags without ids": Request({"user": [[], []], "tag": [[], [4]]}),
    "no ids at all": Request({"user": [[], [], []]}),
    "last rows": Request({"user": [[0, 6]], "movie": [[10]], "tag": [[4]]}),
    "weights": Request(BAGS, {"tag": [[0.5], [2.0, -1.0], []]}),
    "weights of every feature": Request(
        BAGS, {name: [[2.0] * len(bag) for bag in bags] for name, bags in BAGS.items()}
    ),
    "weights of zero": Request({"tag": [[1, 2]]}, {"tag": [[0.0, 1e-30]]}),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_vectors_equal_the_expected_vectors(driver: Driver, name: str) -> None:
    """Repeats the request over one connection: later requests match the templates of the first."""
    request = REQUESTS[name]
    if driver.name.startswith("predictor") and request.weights and "movie" not in request.bags:
        request = replace(request, bags={"user": [[]], "movie": [[]], **request.bags})
    async with driver.connect() as connection:
        for _ in range(2):
            response = await driver.request(request, connection)
            check_vectors(response, driver.engine, request)


async def test_model_is_selected_by_name_and_version(driver: Driver) -> None:
    if not driver.can("model"):
        pytest.skip("requests name no model")
    for name, number in (("shop", ""), ("shop", "7"), ("shop@7", ""), ("ruled", "")):
        request = Request({"user": [[0]]}, model=name, version=number)
        check_vectors(await driver.request(request), driver.engine_of(request), request)


async def test_version_is_selected_by_number_or_alias(servers: Servers, protocol: str) -> None:
    driver = await servers.driver(protocol, VERSIONS)
    if not driver.can("version"):
        pytest.skip("requests name no version")
    stable, canary = driver.engines
    for version, engine in (("7", stable), ("8", canary), ("canary", canary), ("stable", stable)):
        for request in (
            Request(BAGS, model="shop", version=version),
            Request(BAGS, model=f"shop@{version}"),
        ):
            response = await driver.request(request)
            check_vectors(response, engine, request)
            assert response.vectors is not None
            assert response.vectors.version == str(engine.model.version)
    check_vectors(await driver.request(PLAIN), stable, PLAIN)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("keys", [(), ("user",), ("tag", "user"), ("movie", "tag", "user")])
async def test_output_keys_and_dtype_are_selected(
    driver: Driver, dtype: str, keys: tuple[str, ...]
) -> None:
    """Values beyond the largest float16 become infinite."""
    if not driver.can("dtype", "keys"):
        pytest.skip("requests select no outputs")
    driver.engine.tables["t_user"][5] = [1e5, 7e4, 65504, 1e-7]
    bags: Bags = {"tag": [[1], [2, 3], []], "user": [[4], [], [5]]}
    request = Request(bags, output_dtype=dtype, output_keys=keys)
    async with driver.connect() as connection:
        for _ in range(2):
            response = await driver.request(request, connection)
            check_vectors(response, driver.engine, request)


RULED_BAGS: Bags = {
    "user": [[-(2**63), 2**63 - 1, 12], [13, 14]],
    "movie": [[1], [99, -1]],
    "day": [[-(2**63), -1], [2**63 - 1]],
    "shelf": [[], [300]],
}
STRINGS: Bags = {"tag": [["comédie", "war", "映画"], []]}


async def test_ids_are_mapped_to_rows_and_unknown_ids_are_counted(
    servers: Servers, protocol: str
) -> None:
    driver = await servers.driver(protocol, RULED)
    request = Request(RULED_BAGS)
    if driver.can("strings"):
        request = Request(RULED_BAGS | STRINGS)
    async with driver.connect() as connection:
        for _ in range(2):
            check_vectors(await driver.request(request, connection), driver.engine, request)


async def test_integer_ids_may_be_sent_as_strings(servers: Servers, protocol: str) -> None:
    driver = await servers.driver(protocol, RULED)
    if not driver.can("strings"):
        pytest.skip("there are no strings")
    as_strings = {name: [list(map(str, bag)) for bag in bags] for name, bags in RULED_BAGS.items()}
    response = await driver.request(Request(as_strings))
    plain = Request(RULED_BAGS)
    check_vectors(response, driver.engine, plain)


async def test_unpooled_model_returns_a_vector_for_each_id(servers: Servers, protocol: str) -> None:
    driver = await servers.driver(protocol, SEQUENCE)
    bags: Bags = {"last": [[0], [8, 8]], "tag": [[], []], "item": [[9, 3], []]}
    if driver.can("strings"):
        bags["tag"] = [["drama", "war"], []]
    request = Request(bags)
    check_vectors(await driver.request(request), driver.engine, request)
    if driver.can("keys", "dtype"):
        some = replace(request, output_keys=["last"], output_dtype="float16")
        check_vectors(await driver.request(some), driver.engine, some)


async def test_large_response_of_an_unpooled_model_may_have_a_key_without_vectors(
    servers: Servers, protocol: str
) -> None:
    """The response is larger than those that are written in one piece over HTTP/1."""
    driver = await servers.driver(protocol, SEQUENCE)
    ids = np.random.default_rng(1).integers(0, 9, (40, 100)).tolist()
    request = Request({"last": [[]] * 40, "tag": [[]] * 40, "item": ids})
    check_vectors(await driver.request(request), driver.engine, request)


WIDE = Setup([model_info("wide", {"user": (7, 256), "movie": (5, 128), "tag": (3, 256)})])


async def test_large_requests_and_responses_arrive_complete(
    servers: Servers, protocol: str
) -> None:
    """The bodies are larger than a flow-control window, a socket's buffer, and the sizes that are
    decoded and encoded on the event loop."""
    if protocol.startswith("shared-memory"):
        pytest.skip("nothing large goes over the connection")
    driver = await servers.driver(protocol, WIDE)
    random = np.random.default_rng(1)
    examples = 600
    bags: Bags = {
        feature: random.integers(0, rows, (examples, 16)).tolist()
        for feature, rows in (("user", 7), ("movie", 5), ("tag", 3))
    }
    large, small = Request(bags), Request({"user": [[1]]})
    async with driver.connect() as connection:
        exchanges = await driver.start(connection, small, large, small)
        for request, exchange in zip((small, large, small), exchanges, strict=True):
            check_vectors(await driver.read(exchange), driver.engine, request)
