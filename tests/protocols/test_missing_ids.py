"""Tests over every protocol that a router's response counts the ids that no shard could look up."""

from collections.abc import Mapping

import pytest
from protocols.requests import Request, check_vectors
from protocols.servers import MATRIX, Servers, Setup
from server.fake_engine import Bags
from server.fake_models import ruled_info, unpooled_info

from embedserve.lookup_types import LookupResult
from embedserve.pipeline import RequestContext

pytestmark = MATRIX

MISSING = {"user": 1, "movie": 2**40}
SEQUENCE, RULED = Setup([unpooled_info()]), Setup([ruled_info()])
UNKNOWN: Bags = {
    "user": [[12], [14]],
    "movie": [[1], [99, -1]],
    "day": [[0], [1]],
    "shelf": [[], []],
}
ROWS: Bags = {"last": [[0], [8, 8]], "tag": [[], []], "item": [[9, 3], []]}


async def test_response_counts_missing_ids(
    servers: Servers, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also checks that the responses before and after it have no such counts."""
    complete = RequestContext.complete
    missing: Mapping[str, int] = {}

    def complete_without(context: RequestContext, result: LookupResult) -> None:
        result.missing_ids = missing or None
        result.seq = 7 if missing else None
        complete(context, result)

    monkeypatch.setattr(RequestContext, "complete", complete_without)
    for setup, bags in ((RULED, UNKNOWN), (SEQUENCE, ROWS)):
        driver = await servers.driver(protocol, setup)
        request = Request(bags)
        async with driver.connect() as connection:
            for missing in ({}, MISSING, {}):
                response = await driver.request(request, connection)
                seq = 7 if missing else None
                check_vectors(response, driver.engine, request, seq, missing)
