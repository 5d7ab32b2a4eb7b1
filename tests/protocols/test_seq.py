"""Tests of seqs over every protocol. A version that follows deltas returns the seq of its rows, and
a request may require a smallest seq."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from protocols.drivers import Driver
from protocols.requests import Request, check_vectors
from protocols.servers import MATRIX, Servers, Setup
from server.fake_deltas import at_seq
from server.fake_engine import Bags
from server.fake_models import model_info

from embedserve.lookup_types import LookupResult
from embedserve.pipeline import RequestContext

pytestmark = MATRIX

BAGS: Bags = {"user": [[4], [], [6]], "movie": [[], [10, 10], []], "tag": [[1], [2, 3], []]}
SEQS = (0, 1, 127, 128, 1234, 10**12, 2**63 - 1)
AT_SEQ = 1235
SETUP = Setup()
LIVE = Setup([at_seq(model_info(), AT_SEQ)])
WIDE = Setup([model_info("wide", {"user": (7, 256), "movie": (5, 128), "tag": (3, 256)})])


@pytest.fixture
def set_seq(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Returns a function that sets the seq of all later results, as a batcher does."""
    complete = RequestContext.complete

    def set_seq_to(seq: int | None) -> None:
        def complete_at(context: RequestContext, result: LookupResult) -> None:
            result.seq = seq
            complete(context, result)

        monkeypatch.setattr(RequestContext, "complete", complete_at)

    return set_seq_to


SetSeq = Callable[[int | None], None]


async def test_response_has_the_seq_of_its_rows(driver: Driver, set_seq: SetSeq) -> None:
    some = Request(BAGS)
    one = Request({feature: bags[:1] for feature, bags in BAGS.items()})
    async with driver.connect() as connection:
        for seq in (*SEQS, None, *SEQS):
            set_seq(seq)
            for request in (some, one):
                response = await driver.request(request, connection)
                check_vectors(response, driver.engine, request, seq)


async def test_large_response_has_its_seq(servers: Servers, protocol: str, set_seq: SetSeq) -> None:
    """The response is encoded off the event loop, and its writing is recorded."""
    if protocol.startswith("shared-memory"):
        pytest.skip("nothing large goes over the connection")
    driver = await servers.driver(protocol, WIDE)
    bags: Bags = {name: [[0]] * 600 for name in ("user", "movie", "tag")}
    request = Request(bags)
    set_seq(1234)
    check_vectors(await driver.request(request), driver.engine, request, 1234)


async def test_response_with_a_request_id_has_its_seq(driver: Driver, set_seq: SetSeq) -> None:
    request = replace(Request(BAGS), headers={"x-request-id": "a7"})
    set_seq(1234)
    response = await driver.request(request)
    check_vectors(response, driver.engine, request, 1234)
    if driver.name != "stream-grpcio":
        assert response.headers["x-request-id"] == "a7"


@pytest.fixture
def min_seqs(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Collects the min_seq of each completed request, as the server decoded it."""
    complete = RequestContext.complete
    decoded_min_seqs: list[int | None] = []

    def complete_and_record(context: RequestContext, result: LookupResult) -> None:
        decoded_min_seqs.append(context.request.min_seq)
        complete(context, result)

    monkeypatch.setattr(RequestContext, "complete", complete_and_record)
    return decoded_min_seqs


async def test_min_seq_of_a_request_is_decoded(
    servers: Servers, protocol: str, min_seqs: list[int | None]
) -> None:
    """Includes requests without a min_seq in between, which match templates, and features in
    another order, for which the server copies the request."""
    driver = await servers.driver(protocol, LIVE)
    requested = [None, 0, None, 1234, None, AT_SEQ, None]
    some = Request({"tag": [[1]], "movie": [[2]], "user": [[3]]})
    async with driver.connect() as connection:
        for request in (Request(BAGS), some):
            min_seqs.clear()
            for seq in requested:
                one = replace(request, min_seq=seq)
                check_vectors(await driver.request(one, connection), driver.engine, one)
            assert min_seqs == requested


async def test_min_seq_ahead_of_the_rows_is_rejected_with_retry_after(
    servers: Servers, protocol: str
) -> None:
    driver = await servers.driver(protocol, LIVE)
    for min_seq in (AT_SEQ + 1, 2**63 - 1):
        response = await driver.request(replace(Request(BAGS), min_seq=min_seq))
        assert response.code == "UNAVAILABLE"
        assert f"min_seq is {min_seq}, the rows of model 'shop' are at seq 1235" in response.message
        if "stream" not in protocol:  # a stream's errors are messages
            assert response.headers["retry-after"] == "1"


async def test_min_seq_for_a_model_without_deltas_is_rejected(driver: Driver) -> None:
    response = await driver.request(replace(Request(BAGS), min_seq=1))
    assert response.code == "INVALID_ARGUMENT"
    assert "min_seq is 1, but model 'shop' follows no deltas" in response.message
