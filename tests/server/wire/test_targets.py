"""Tests that invalid bytes in a request target are rejected alike, counted, and logged rarely."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import AsyncIterator, Iterator

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, StreamEnded
from server.fake_engine import FakeEngine
from server.live import Live, live_server
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


async def over_http1(port: int, target: bytes) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = b"POST %b HTTP/1.1\r\nHost: test\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        writer.write(head % target)
        response = await asyncio.wait_for(reader.read(), WAIT_S_MAX)
    finally:
        writer.close()
    head, _, body = response.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


async def over_http2(
    port: int, target: bytes, requests: int = 1, method: bytes = b"POST"
) -> list[tuple[int, bytes]]:
    """Returns the responses to ``requests`` requests on one connection."""
    config = H2Configuration(
        header_encoding=None, validate_outbound_headers=False, normalize_outbound_headers=False
    )
    client = H2Connection(config)
    client.initiate_connection()
    head = [(b":method", method), (b":scheme", b"http"), (b":path", target)]
    statuses: dict[int, int] = {}
    bodies: dict[int, bytes] = {}
    ended = 0
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for _ in range(requests):
            number = client.get_next_available_stream_id()
            client.send_headers(number, [*head, (b":authority", b"test")], end_stream=True)
            writer.write(client.data_to_send())
            while number not in statuses or ended < len(statuses):
                for event in client.receive_data(
                    await asyncio.wait_for(reader.read(1 << 16), WAIT_S_MAX)
                ):
                    if isinstance(event, ResponseReceived):
                        statuses[event.stream_id] = int(dict(event.headers)[b":status"])
                        bodies[event.stream_id] = b""
                    elif isinstance(event, DataReceived):
                        bodies[event.stream_id] += event.data
                        nbytes = event.flow_controlled_length
                        client.acknowledge_received_data(nbytes, event.stream_id)
                    elif isinstance(event, StreamEnded):
                        ended += 1
                writer.write(client.data_to_send())
    finally:
        writer.close()
    return [(statuses[number], bodies[number]) for number in sorted(statuses)]


@pytest.mark.parametrize("name", TARGETS)
async def test_invalid_byte_in_a_target_is_rejected_and_counted(
    live: Live, logged: io.StringIO, name: str
) -> None:
    target = TARGETS[name]
    assert (await over_http1(live.http_port, target))[0] == 400
    grpc_port = int(live.grpc_target.rpartition(":")[2])
    for number, port in enumerate((live.http_port, grpc_port), 2):
        ((status, body),) = await over_http2(port, target)
        assert status == 400, body
        assert "percent-encode it" in json.loads(body)["error"]["message"]
        assert live.outcomes("rest") == {"INVALID_ARGUMENT": number}
    text = logged.getvalue()
    assert "Traceback" not in text
    assert text.replace("\n", "").isprintable()


async def test_invalid_targets_are_logged_at_a_limited_rate(
    live: Live, logged: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_limited_logger, "PERIOD_S", 3600.0)  # longer than a test takes
    requests = 500
    responses = await over_http2(live.http_port, b"/health/live?\xff", requests)
    assert {status for status, _ in responses} == {400}
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
    responses = await over_http2(live.http_port, path.encode(), 30, b"GET")
    assert [status for status, _ in responses] == [500] * 30
    text = logged.getvalue()
    records = [line for line in text.splitlines() if not line.startswith("    ")]
    assert len(records) == TRACEBACKS_MAX  # of both protocols together
    assert all(" ERROR " in line for line in records)
    assert not any(line.startswith("2026 ERROR") for line in records)
    assert text.replace("\n", "").isprintable()
    assert asgi.__name__ in text
