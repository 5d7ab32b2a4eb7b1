"""Tests of seqs over every protocol. A version that follows deltas returns the seq of its rows, and
a request may require a smallest seq."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from protocols.requests import Request, check_vectors
from protocols.servers import MATRIX, Servers, Setup
from server.fake_deltas import at_seq
from server.fake_engine import Bags
from server.fake_models import model_info, ruled_info, unpooled_info

from embedserve.lookup_types import LookupResult
from embedserve.pipeline import RequestContext

pytestmark = MATRIX

BAGS: Bags = {"user": [[4], [], [6]], "movie": [[], [10, 10], []], "tag": [[1], [2, 3], []]}
SEQS = (0, 1, 127, 128, 1234, 10**12, 2**63 - 1)
AT_SEQ = 1235
SHOP, SEQUENCE = Setup(), Setup([unpooled_info()])
LIVE = Setup([at_seq(model_info(), AT_SEQ)])
RULED = Setup([ruled_info()])
UNKNOWN: Bags = {
    "user": [[12], [14]],
    "movie": [[1], [99, -1]],
    "day": [[0], [1]],
    "shelf": [[], []],
}
WIDE = Setup([model_info("wide", {"user": (7, 256), "movie": (5, 128), "tag": (3, 256)})])


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Returns a function that sets the seq of all later results, as a batcher does."""
    complete = RequestContext.complete

    def follow_to(seq: int | None) -> None:
        def complete_at(context: RequestContext, result: LookupResult) -> None:
            result.seq = seq
            complete(context, result)

        monkeypatch.setattr(RequestContext, "complete", complete_at)

    return follow_to


Follow = Callable[[int | None], None]


async def test_a_response_names_its_seq(servers: Servers, protocol: str, follow: Follow) -> None:
    driver = await servers.driver(protocol, SHOP)
    some = Request(BAGS)
    one = Request({feature: bags[:1] for feature, bags in BAGS.items()})
    async with driver.connect() as connection:
        for seq in (*SEQS, None, *SEQS):
            follow(seq)
            for request in (some, one):
                response = await driver.ask(request, connection)
                check_vectors(response, driver.engine, request, seq)


async def test_selected_keys_and_float16(servers: Servers, protocol: str, follow: Follow) -> None:
    driver = await servers.driver(protocol, SHOP)
    if not driver.can("dtype", "keys"):
        pytest.skip("requests select no outputs")
    follow(1234)
    request = Request(BAGS, output_dtype="float16", output_keys=("tag", "user"))
    check_vectors(await driver.ask(request), driver.engine, request, 1234)


async def test_an_unpooled_response(servers: Servers, protocol: str, follow: Follow) -> None:
    driver = await servers.driver(protocol, SEQUENCE)
    request = Request({"last": [[0], [8, 8]], "tag": [[], []], "item": [[9, 3], []]})
    follow(1234)
    check_vectors(await driver.ask(request), driver.engine, request, 1234)


async def test_a_response_with_unknown_ids(servers: Servers, protocol: str, follow: Follow) -> None:
    driver = await servers.driver(protocol, RULED)
    request = Request(UNKNOWN)
    follow(1234)
    check_vectors(await driver.ask(request), driver.engine, request, 1234)


async def test_a_large_response(servers: Servers, protocol: str, follow: Follow) -> None:
    """The response is encoded off the event loop, and its writing is recorded."""
    if protocol.startswith("shared-memory"):
        pytest.skip("nothing large goes over the connection")
    driver = await servers.driver(protocol, WIDE)
    bags: Bags = {name: [[0]] * 600 for name in ("user", "movie", "tag")}
    request = Request(bags)
    follow(1234)
    check_vectors(await driver.ask(request), driver.engine, request, 1234)


async def test_a_request_id_beside_it(servers: Servers, protocol: str, follow: Follow) -> None:
    driver = await servers.driver(protocol, SHOP)
    request = replace(Request(BAGS), headers={"x-request-id": "a7"})
    follow(1234)
    response = await driver.ask(request)
    check_vectors(response, driver.engine, request, 1234)
    if protocol != "stream-grpcio":
        assert response.headers["x-request-id"] == "a7"


@pytest.fixture
def min_seqs(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Collects the min_seq of each completed request, as the server decoded it."""
    complete = RequestContext.complete
    seen: list[int | None] = []

    def complete_and_note(context: RequestContext, result: LookupResult) -> None:
        seen.append(context.request.min_seq)
        complete(context, result)

    monkeypatch.setattr(RequestContext, "complete", complete_and_note)
    return seen


async def test_a_min_seq_is_read(
    servers: Servers, protocol: str, min_seqs: list[int | None]
) -> None:
    """Includes requests without a min_seq in between, which match templates, and features in
    another order, for which the server copies the request."""
    driver = await servers.driver(protocol, LIVE)
    asked = [None, 0, None, 1234, None, AT_SEQ, None]
    some = Request({"tag": [[1]], "movie": [[2]], "user": [[3]]})
    async with driver.connect() as connection:
        for request in (Request(BAGS), some):
            min_seqs.clear()
            for seq in asked:
                one = replace(request, min_seq=seq)
                check_vectors(await driver.ask(one, connection), driver.engine, one)
            assert min_seqs == asked


async def test_a_min_seq_that_is_none_is_rejected(servers: Servers, protocol: str) -> None:
    driver = await servers.driver(protocol, SHOP)
    response = await driver.ask(replace(Request(BAGS), min_seq=-1))
    assert response.code == "INVALID_ARGUMENT"
    assert f"expected an integer from 0 to {2**63 - 1}" in response.message
    assert "min" in response.message.partition(" is ")[0]
    if response.field:
        assert response.message.startswith(f"{response.field} is ")


async def test_a_server_that_is_behind_says_when_to_come_back(
    servers: Servers, protocol: str
) -> None:
    driver = await servers.driver(protocol, LIVE)
    for min_seq in (AT_SEQ + 1, 2**63 - 1):
        response = await driver.ask(replace(Request(BAGS), min_seq=min_seq))
        assert response.code == "UNAVAILABLE"
        assert f"min_seq is {min_seq}, the rows of model 'shop' are at seq 1235" in response.message
        if "stream" not in protocol:  # a stream's errors are messages
            assert response.headers["retry-after"] == "1"


async def test_a_model_without_deltas_has_no_seq_to_wait_for(
    servers: Servers, protocol: str
) -> None:
    driver = await servers.driver(protocol, SHOP)
    response = await driver.ask(replace(Request(BAGS), min_seq=1))
    assert response.code == "INVALID_ARGUMENT"
    assert "min_seq is 1, but model 'shop' follows no deltas" in response.message
