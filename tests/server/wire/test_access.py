"""Tests of tokens and certificates over every protocol: each path authenticates a request once."""

import json
import ssl
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import grpc
import pytest
from certificates import Authority, client_context
from grpc_health.v1 import health_pb2, health_pb2_grpc
from server.fake_engine import FakeEngine, model_info
from server.http2_client import Http2Client
from server.live import Live, make_pipeline, serving
from server.raw_http import OurServer, chunked, post, read_response
from server.waiting import WAIT_S_MAX, until

from embedserve.access.authenticator import Authenticator
from embedserve.access.caller_quota import REJECTIONS_BURST_S, REJECTIONS_PER_S
from embedserve.access.grants import hash_of
from embedserve.config import Limits
from embedserve.pipeline import RequestPipeline
from embedserve.pipeline.telemetry import RequestTelemetry
from embedserve.wire import wire_server
from embedserve.wire.tls.certificates import Certificates, TlsFiles
from embedserve_client import (
    EmbedClient,
    EmbedResult,
    Overloaded,
    PermissionDenied,
    Unauthenticated,
)
from embedserve_client.grpc.client import AsyncGrpcEmbedClient
from embedserve_client.rest.client import AsyncEmbedClient
from embedserve_proto import embedding_pb2 as pb
from embedserve_proto import open_inference_pb2 as oip
from embedserve_proto.open_inference_pb2_grpc import GRPCInferenceServiceStub

BODY = b'{"features": {"user": [[1]]}}'
MAKES = (post, chunked)
REQUEST = pb.EmbedRequest(keys=["user"], ids=[1], lengths=[1])
TOKENS: dict[str, dict[str, Any]] = {
    "es_right": {},
    "es_shop": {"models": ["shop"]},
    "es_late": {"expires": "2020-01-01"},
    "es_lost": {"revoked": True},
    "es_boss": {"roles": ["admin"]},
    "es_slow": {"requests_per_second": 0.01},
    "es_one": {"concurrent": 1},
}
CODES = {200: "OK", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 429: "RESOURCE_EXHAUSTED"}


@pytest.fixture
def pipeline(engine: FakeEngine, executor: ThreadPoolExecutor, tmp_path: Path) -> RequestPipeline:
    path = tmp_path / "tokens"
    lines = [
        json.dumps({"name": token[3:], "sha256": hash_of(token.encode()), **keys})
        for token, keys in TOKENS.items()
    ]
    lines.append(json.dumps({"name": "by-certificate", "certificate": "ranker"}))
    path.write_text("\n".join(lines))
    films = FakeEngine(model_info("films", {"user": (7, 2)}), seed=1)
    limits = Limits(inline_bytes_max=0)
    access = Authenticator(str(path))
    return make_pipeline(engine, films, executor=executor, limits=limits, authenticator=access)


@pytest.fixture
async def live(pipeline: RequestPipeline) -> AsyncIterator[Live]:
    async with serving(pipeline) as live:
        yield live


def line_of(token: str | None) -> list[str]:
    return [] if token is None else [f"Authorization: Bearer {token}"]


async def test_metrics_and_log_name_the_caller(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "embedserve")
    live.pipeline.metrics.callers.callers = live.pipeline.authenticator
    live.pipeline.telemetry = RequestTelemetry(slow_ms=1e-6)
    headers = {"Authorization": "Bearer es_right"}
    assert (await live.http.post("/embed", content=BODY, headers=headers)).status_code == 200
    assert (await live.http.post("/embed", content=b"{", headers=headers)).status_code == 400
    assert (await live.http.post("/embed", content=BODY)).status_code == 401
    boss = {"Authorization": "Bearer es_boss"}
    assert (await live.http.post("/embed", content=BODY, headers=boss)).status_code == 403
    (record,) = [one for one in caplog.records if "PERMISSION_DENIED" in one.message]
    assert vars(record)["fields"]["caller"] == "boss"
    (record,) = [one for one in caplog.records if one.message == "slow request"]
    assert vars(record)["fields"]["caller"] == "right"
    assert "es_" not in caplog.text
    assert list(live.pipeline.metrics.callers.samples()) == []
    live.pipeline.metrics.flush()
    assert {(*labels, count) for _, labels, count in live.pipeline.metrics.callers.samples()} == {
        ("right", "OK", 1),
        ("right", "INVALID_ARGUMENT", 1),
        ("(unknown)", "UNAUTHENTICATED", 1),
        ("boss", "PERMISSION_DENIED", 1),
    }


async def test_duplicate_authorization_header_is_rejected(server: OurServer) -> None:
    for make in MAKES:
        response = await server.talk(
            make(BODY, *line_of("es_right"), *line_of("es_shop"), "Connection: close")
        )
        assert response.startswith(b"HTTP/1.1 401 ")


def metadata_of(token: str | None) -> tuple[tuple[str, str], ...]:
    return () if token is None else (("authorization", f"Bearer {token}"),)


async def code_of(call: Any) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


async def test_each_request_of_a_stream_counts_toward_the_rate(live: Live) -> None:
    async with AsyncGrpcEmbedClient(live.grpc_target, token="es_slow") as client:
        responses = client.embed_stream([{"user": [[1]]}] * 3)
        kinds = [
            type(response) async for response in responses
        ]  # opening the stream does not count
    assert kinds == [EmbedResult, Overloaded, Overloaded]


REJECTIONS = int(REJECTIONS_BURST_S * REJECTIONS_PER_S) + 40
WAITED_S_MIN = 39 / REJECTIONS_PER_S


async def test_frequent_rejections_are_delayed_over_http1(server: OurServer) -> None:
    """Checks also that the connection is usable after the delay."""
    reader, writer = await server.open()
    start_s = perf_counter()
    statuses = []
    for _ in range(1 + REJECTIONS):
        writer.write(post(BODY, *line_of("es_slow")))
        statuses.append((await read_response(reader))[0])
    assert statuses == [200] + [429] * REJECTIONS
    assert perf_counter() - start_s >= WAITED_S_MIN
    writer.write(post(BODY, *line_of("es_right")))
    assert (await read_response(reader))[0] == 200


async def test_frequent_rejections_are_delayed_over_http2(server: OurServer) -> None:
    """Checks that a body that arrives during the delay is not looked up."""
    client = Http2Client(*await server.open())
    start_s = perf_counter()
    responses = [
        await client.request("POST", "/embed", BODY, {"authorization": "Bearer es_slow"})
        for _ in range(1 + REJECTIONS)
    ]
    assert [one.status for one in responses] == [200] + [429] * REJECTIONS
    assert perf_counter() - start_s >= WAITED_S_MIN
    assert server.outcomes() == {"OK": 1, "RESOURCE_EXHAUSTED": REJECTIONS}


async def test_frequent_rejections_are_delayed_over_grpc(live: Live) -> None:
    start_s = perf_counter()
    codes = [
        await code_of(live.stub.Embed(REQUEST, metadata=metadata_of("es_slow")))
        for _ in range(1 + REJECTIONS)
    ]
    assert codes == ["OK"] + ["RESOURCE_EXHAUSTED"] * REJECTIONS
    assert perf_counter() - start_s >= WAITED_S_MIN
    assert live.outcomes("grpc") == {"OK": 1, "RESOURCE_EXHAUSTED": REJECTIONS}


async def test_disconnected_clients_with_delayed_rejections_are_forgotten(
    server: OurServer,
) -> None:
    count = 2 * REJECTIONS
    writers = [(await server.open())[1] for _ in range(count)]
    for writer in writers:
        writer.write(post(BODY, *line_of("es_slow")))
    await until(lambda: server.outcomes().get("RESOURCE_EXHAUSTED", 0) >= 1)
    for writer in writers:
        writer.transport.abort()
    await until(lambda: not server.wire.connections)
    assert server.outcomes().keys() <= {"OK", "RESOURCE_EXHAUSTED", "CANCELLED"}


async def test_management_routes_require_the_right_roles(live: Live) -> None:
    wanted = {
        "/health/live": (200, 200, 200),
        "/health/ready": (200, 200, 200),
        "/models": (401, 200, 200),
        "/models/shop": (401, 200, 200),
        "/metrics": (401, 403, 200),
        "/info": (401, 403, 200),
        "/docs": (401, 403, 200),
        "/openapi.json": (401, 403, 200),
        "/none": (401, 403, 404),
    }
    for path, statuses in wanted.items():
        for token, status in zip((None, "es_right", "es_boss"), statuses, strict=True):
            headers = {} if token is None else {"authorization": f"Bearer {token}"}
            response = await live.http.get(path, headers=headers)
            assert (path, token, response.status_code) == (path, token, status)
    check = health_pb2_grpc.HealthStub(live.channel).Check(health_pb2.HealthCheckRequest())
    assert await code_of(check) == "OK"


async def test_rejected_grpc_management_call_is_counted_and_logged(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "embedserve")
    metadata = metadata_of("es_unknown")
    call = live.stub.ListModels(pb.ListModelsRequest(), metadata=metadata)
    assert await code_of(call) == "UNAUTHENTICATED"
    assert live.outcomes("grpc") == {"UNAUTHENTICATED": 1}
    assert "rejected with UNAUTHENTICATED: the token is unknown" in caplog.text


async def test_pipelined_requests_are_authenticated_one_by_one(server: OurServer) -> None:
    reader, writer = await server.open()
    tokens = ["es_right", None, "es_right", "es_unknown", "es_shop"]
    writer.write(b"".join(post(BODY, *line_of(token)) for token in tokens))
    statuses = [(await read_response(reader))[0] for _ in tokens]
    assert statuses == [200, 401, 200, 401, 200]


async def test_caller_keeps_its_limit_if_its_pipelining_connection_is_cut(
    server: OurServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Makes the connection the largest by the buffered requests behind its first one."""
    request = post(BODY, *line_of("es_one"))  # at most one concurrent request
    reader, writer = await server.open(request)
    assert (await read_response(reader))[0] == 200
    with monkeypatch.context() as patched:
        patched.setattr(wire_server, "CHECK_BYTES", 0)
        limits = replace(server.wire._limits, connection_bytes_max=0)
        patched.setattr(server.wire, "_limits", limits)
        server.connection.data_received(request * 2)
    writer.close()
    await until(lambda: not server.wire.connections)
    reader, writer = await server.open(request)
    assert (await read_response(reader))[0] == 200
    assert len(engine.lookups) == 2
    assert server.outcomes() == {"OK": 2, "CANCELLED": 1}


async def test_python_clients_raise_authentication_errors(live: Live) -> None:
    rest, target = f"127.0.0.1:{live.http_port}", live.grpc_target
    for make, address in ((AsyncEmbedClient, rest), (AsyncGrpcEmbedClient, target)):
        async with make(address, token="es_right", timeout_s=WAIT_S_MAX) as client:
            assert (await client.embed({"user": [[1]]})).values.size
            assert (await client.models()).models
        for token, error in {
            None: Unauthenticated,
            "es_late": Unauthenticated,
            "es_boss": PermissionDenied,
        }.items():
            async with make(address, token=token, timeout_s=WAIT_S_MAX) as client:
                with pytest.raises(error):
                    await client.embed({"user": [[1]]})
    async with AsyncEmbedClient(rest, token="es_slow", timeout_s=WAIT_S_MAX) as client:
        await client.embed({"user": [[1]]})
        with pytest.raises(Overloaded) as raised:
            await client.embed({"user": [[1]]})
        assert raised.value.retry_after_s == 60
    with pytest.raises(ValueError, match="token: not one word"):
        EmbedClient(rest, token="two words")


async def test_names_of_client_certificates_are_used(
    pipeline: RequestPipeline, executor: ThreadPoolExecutor, tmp_path: Path
) -> None:
    authority = Authority()
    paths = authority.sign("server").write(tmp_path, "server")
    (tmp_path / "ca.pem").write_bytes(authority.root)
    files = TlsFiles(str(paths[0]), str(paths[1]), str(tmp_path / "ca.pem"))
    contexts: dict[str, ssl.SSLContext] = {
        name: client_context(authority.root, authority.sign(name).write(tmp_path, name))
        for name in ("ranker", "stranger")
    }
    async with OurServer(pipeline, Certificates(files)) as server:
        for name, wanted in {"ranker": 200, "stranger": 401}.items():
            for make in MAKES:
                reader, writer = await server.open(make(BODY), contexts[name])
                assert (await read_response(reader))[0] == wanted
                writer.write(make(BODY, *line_of("es_right")))  # a token takes precedence
                assert (await read_response(reader))[0] == 200
            client = Http2Client(*await server.open(context=contexts[name]))
            assert (await client.request("POST", "/embed", BODY)).status == wanted
            assert (await client.request("GET", "/models")).status == wanted


STATISTICS = {
    "es_right": {"shop", "films"},
    "es_boss": {"shop", "films"},
    "es_shop": {"shop"},
}
"""Models whose statistics each token may read."""


@pytest.mark.parametrize("token", STATISTICS)
async def test_statistics_are_limited_to_the_models_of_a_token(live: Live, token: str) -> None:
    headers, names = {"Authorization": f"Bearer {token}"}, STATISTICS[token]
    service = GRPCInferenceServiceStub(live.channel)
    model_statistics = (await live.http.get("/v2/models/stats", headers=headers)).json()
    assert {one["name"] for one in model_statistics["model_stats"]} == names
    request = oip.ModelStatisticsRequest()
    statistics = await service.ModelStatistics(request, metadata=metadata_of(token))
    assert {one.name for one in statistics.model_stats} == names
    for model in ("shop", "films"):
        wanted = 200 if model in names else 403
        path = f"/v2/models/{model}/stats"
        assert (await live.http.get(path, headers=headers)).status_code == wanted
        request = oip.ModelStatisticsRequest(name=model)
        call = service.ModelStatistics(request, metadata=metadata_of(token))
        assert await code_of(call) == CODES[wanted]
