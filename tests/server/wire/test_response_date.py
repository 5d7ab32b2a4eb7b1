"""Tests of the Date header of responses over HTTP/1; test_rest_http2.py compares HTTP/2."""

import re
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

import pytest
from server.raw_http import OurServer, chunked, get, post
from server.waiting import until

from embedserve.pipeline import RequestPipeline
from embedserve.wire import wire_server

BODY = b'{"features": {"user": [[1]]}}'
REQUESTS = {
    "lookup": post(BODY),
    "slow path": chunked(BODY),
    "error": post(b"{"),
    "error of the slow path": chunked(b"{"),
    "management": get("/models"),
    "invalid headers": b"GET /models HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_every_response_has_a_date(server: OurServer, name: str) -> None:
    reader, _ = await server.open(REQUESTS[name])
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    (value,) = [line.removeprefix("date: ") for line in lines if line.startswith("date:")]
    assert re.fullmatch(r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", value)
    assert datetime.now(UTC) - parsedate_to_datetime(value) < timedelta(minutes=1)


async def test_date_is_refreshed(
    pipeline: RequestPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_server, "CHECK_S", 0.01)
    async with OurServer(pipeline) as server:
        date = server.wire.date
        date.line = date.block = b""
        await until(lambda: b" GMT\r\n" in date.line and b" GMT" in date.block)
