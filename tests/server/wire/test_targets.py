"""Tests that invalid bytes in a request target are rejected alike, counted, and logged rarely."""

import asyncio
import io
import json
import logging
from collections.abc import AsyncIterator, Iterator

import pytest
from server.fake_engine import FakeEngine
from server.http2_client import http2_client
from server.live import Live, live_server
from server.raw_http import read_response
from server.waiting import WAIT_S_MAX

from embedserve.metrics import rate_limited_logger
from embedserve.metrics.rate_limited_logger import TRACEBACKS_MAX
from embedserve.metrics.request_metrics import LINES_MAX
from embedserve.processes.logging_setup import log_handler
from embedserve.wire import asgi

TARGETS = {
    "byte in the query": b"/health/live?\xff",
    "byte in the query of a route that is none": b"/nothing?a=\xff",
    "byte in the query of a redirect": b"/models/?\xff",
    "byte in the query of an embed route": b"/embed?\xff",
    "byte in the path": b"/models/\xff",
    "byte in the path of an embed route": b"/models/\xff/embed",
    "fragment": b"/health/live#x",
    "empty fragment of a query": b"/embed?a#",
    "control": b"/models/\x1b[2J",
    "delete": b"/models/\x7f",
}


@pytest.fixture
async def live(engine: FakeEngine) -> AsyncIterator[Live]:
    async with live_server(engine) as live:
        yield live


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """Yields the output of the server's own log handler."""
    stream = io.StringIO()
    handler = log_handler("text", stream)
    logger = logging.getLogger()
    logger.addHandler(handler)
    embedserve = logging.getLogger("embedserve")
    level = embedserve.level
    embedserve.setLevel(logging.INFO)
    yield stream
    embedserve.setLevel(level)
    logger.removeHandler(handler)


async def over_http1(port: int, target: bytes) -> int:
    """Returns the status of the response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST %b HTTP/1.1\r\nHost: test\r\nContent-Length: 0\r\n\r\n" % target)
    status, _, _ = await asyncio.wait_for(read_response(reader), WAIT_S_MAX)
    writer.close()
    return status


@pytest.mark.parametrize("name", TARGETS)
async def test_invalid_byte_in_a_target_is_rejected_and_counted(
    live: Live, logged: io.StringIO, name: str
) -> None:
    target = TARGETS[name]
    assert await over_http1(live.http_port, target) == 400
    grpc_port = int(live.grpc_target.rpartition(":")[2])
    for number, port in enumerate((live.http_port, grpc_port), 2):
        async with http2_client(port) as client:
            response = await client.request("POST", target)
        assert response.status == 400, response
        assert "percent-encode it" in json.loads(response.body)["error"]["message"]
        assert live.outcomes("rest") == {"INVALID_ARGUMENT": number}
    text = logged.getvalue()
    assert "Traceback" not in text
    assert text.replace("\n", "").isprintable()


async def test_invalid_targets_are_logged_at_a_limited_rate(
    live: Live, logged: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_limited_logger, "PERIOD_S", 3600.0)  # longer than a test takes
    requests = 500
    async with http2_client(live.http_port) as client:
        for _ in range(requests):
            assert (await client.request("POST", b"/health/live?\xff")).status == 400
    assert live.outcomes("rest") == {"INVALID_ARGUMENT": requests}
    assert len(logged.getvalue().splitlines()) <= LINES_MAX


@pytest.mark.parametrize("path", ["/models/%0a2026%20ERROR%20all%20is%20lost", "/models/%1b[2J"])
async def test_unexpected_failures_are_logged_quoted_at_a_limited_rate(
    live: Live, logged: io.StringIO, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def fail(self: object, name: str) -> None:
        raise RuntimeError(name)

    monkeypatch.setattr(rate_limited_logger, "PERIOD_S", 3600.0)  # longer than a test takes
    monkeypatch.setattr(type(live.pipeline.models), "model", fail)
    for _ in range(30):
        assert (await live.http.get(path)).status_code == 500
    async with http2_client(live.http_port) as client:
        for _ in range(30):
            assert (await client.request("GET", path)).status == 500
    text = logged.getvalue()
    records = [line for line in text.splitlines() if not line.startswith("    ")]
    assert len(records) == TRACEBACKS_MAX  # of both protocols together
    assert all(" ERROR " in line for line in records)
    assert not any(line.startswith("2026 ERROR") for line in records)
    assert text.replace("\n", "").isprintable()
    assert asgi.__name__ in text
