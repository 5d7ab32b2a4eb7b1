"""Over every protocol an answer repeats its request's id, and an error always has one, which the
log has, too; with where the time went where that is wanted."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator

import grpc
import pytest
from server.fake_engine import FakeEngine
from server.http2_client import http2_client
from server.live import GRPC_SERVERS, Live, live_server
from server.ways import WAYS, Way, fields_of

from embedserve.pipeline.telemetry import LINES_MAX, RequestTelemetry
from embedserve.tracing.request_id import ID_BYTES_MAX

ID = "x-request-id"
MADE = re.compile("[0-9a-f]{32}")
STAGES = ["read", "queue", "lookup", "encode"]


@pytest.fixture(params=WAYS)
async def way(request: pytest.FixtureRequest, engine: FakeEngine) -> AsyncIterator[Way]:
    name: str = request.param
    server = name if name in GRPC_SERVERS else "native"
    async with live_server(engine, grpc_server=server) as live:
        live.pipeline.telemetry = RequestTelemetry()
        yield Way(name, live)


async def test_an_id_is_repeated(way: Way) -> None:
    for is_wrong in (False, True):
        told = await way.ask(is_wrong, x_request_id="a7/Z~")
        assert (told.is_ok, told.headers[ID]) == (not is_wrong, "a7/Z~")


async def test_a_request_without_an_id_has_one_once_it_fails(
    way: Way, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    told = await way.ask()
    assert told.is_ok
    assert ID not in told.headers
    told = await way.ask(is_wrong=True)
    assert not told.is_ok
    assert MADE.fullmatch(told.headers[ID])
    (fields,) = fields_of(caplog, "refused with INVALID_ARGUMENT: features.user")
    assert fields["request_id"] == told.headers[ID]
    assert [fields[name] for name in ("model", "version", "examples", "ids")] == ["shop", 7, 1, 1]
    assert {"read_ms", "queue_ms", "lookup_ms", "total_ms"} <= fields.keys()


async def test_an_id_that_cannot_be_used_is_replaced_and_named_now_and_then(
    way: Way, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2 * LINES_MAX):
        told = await way.ask(x_request_id="x" * (ID_BYTES_MAX + 1))
        assert told.is_ok
        assert MADE.fullmatch(told.headers[ID])
    said = [line for line in caplog.messages if line.startswith("x-request-id is not used: 'x")]
    assert len(said) <= LINES_MAX


async def test_a_slow_request_is_logged_with_where_its_time_went(
    way: Way, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    way.live.pipeline.telemetry = RequestTelemetry(slow_ms=50)
    assert ID not in (await way.ask()).headers
    engine.delay_s = 0.06
    told = await way.ask()
    (fields,) = fields_of(caplog, "slow request")
    assert told.headers[ID] == fields["request_id"]
    assert fields["outcome"] == "OK"
    stages = [fields[f"{name}_ms"] for name in (*STAGES, "write")]
    assert fields["lookup_ms"] >= 60
    assert sum(stages) == pytest.approx(fields["total_ms"], abs=0.01)


async def test_answers_tell_their_times_where_that_is_wanted(way: Way) -> None:
    if way.name == "stream":
        return  # it has one end, and many requests
    way.live.pipeline.telemetry = RequestTelemetry(tells_times=True)
    for is_wrong in (False, True):
        told = await way.ask(is_wrong)
        parts = dict(part.split(";dur=") for part in told.headers["server-timing"].split(", "))
        assert list(parts) == [*(STAGES[:3] if is_wrong else STAGES), "total"]
        assert sum(map(float, parts.values())) == pytest.approx(2 * float(parts["total"]), abs=0.01)


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", "/nowhere", {}),
        ("GET", "/models/nobody", {}),
        ("GET", "/v2/models/nobody", {}),
        ("PUT", "/embed", {}),
        ("POST", "/embed", {"Content-Encoding": "gzip"}),
        ("POST", "/embed", {"X-Much": "x" * 16_300}),
    ],
)
async def test_whatever_http_is_refused_has_an_id(
    live: Live, method: str, path: str, headers: dict[str, str]
) -> None:
    for ours in ({}, {ID: "mine"}):
        answer = await live.http.request(method, path, headers=headers | ours)
        assert answer.status_code >= 400
        assert answer.headers[ID] == "mine" if ours else MADE.fullmatch(answer.headers[ID])
        async with http2_client(live.http_port) as client:
            lower = {name.lower(): value for name, value in (headers | ours).items()}
            over_http2 = await client.request(method, path, b"{", lower)
        assert over_http2.status == answer.status_code
        assert over_http2.headers[ID] == "mine" if ours else MADE.fullmatch(over_http2.headers[ID])


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("/embedserve.v1.EmbeddingService/Nothing", b""),
        ("/embedserve.v1.EmbeddingService/GetModel", b"\x0a\x06nobody"),
        ("/embedserve.v1.EmbeddingService/Embed", b"\xff"),
        ("/embedserve.v1.EmbeddingService/EmbedStream", b"x" * 2000),
        ("/grpc.health.v1.Health/Check", b"\x0a\x06nobody"),
    ],
)
async def test_whatever_grpc_is_refused_has_an_id(live: Live, method: str, message: bytes) -> None:
    for ours in ([], [(ID, "mine")]):
        call = live.channel.unary_unary(method)(message, metadata=ours)
        assert await call.code() != grpc.StatusCode.OK
        told = dict(await call.trailing_metadata())[ID]
        assert told == "mine" if ours else MADE.fullmatch(told)
