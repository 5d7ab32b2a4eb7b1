"""Tests of gRPC's health service: checks, watches until the drain, and invalid requests."""

import tracemalloc
from time import perf_counter

import pytest
from grpc_health.v1 import health_pb2
from server.wire.grpc.grpc_peer import CHECK, EMBED, MESSAGE, WATCH, GrpcPeer, data_chunks

from embedserve.errors import DRAINING
from embedserve.wire.grpc.grpc_framing import framed
from embedserve.wire.grpc.service import SERVICE_NAME
from embedserve.wire.http2.control import STREAMS_MAX
from embedserve.wire.http2.protocol import STREAM_BYTES


def health_statuses(peer: GrpcPeer, stream_id: int) -> list[int]:
    found = peer.messages(stream_id)
    return [health_pb2.HealthCheckResponse.FromString(one).status for one in found]


@pytest.mark.parametrize("service", ["", SERVICE_NAME, "grpc.health.v1.Health"])
async def test_health_check_returns_serving_or_not_serving(peer: GrpcPeer, service: str) -> None:
    body = framed(health_pb2.HealthCheckRequest(service=service).SerializeToString())
    peer.call(1, CHECK, body)
    peer.pipeline.models.not_ready = DRAINING
    peer.call(3, CHECK, body)
    assert [health_statuses(peer, number) for number in (1, 3)] == [[1], [2]]


async def test_health_of_an_unknown_service_is_not_found(peer: GrpcPeer) -> None:
    body = framed(health_pb2.HealthCheckRequest(service="nothing").SerializeToString())
    peer.call(1, CHECK, body)
    assert peer.status(1)[0] == 5
    peer.call(3, WATCH, body)
    assert (health_statuses(peer, 3), 3 in peer.trailers) == ([3], False)


async def test_health_watch_reports_a_change_once(peer: GrpcPeer) -> None:
    peer.call(1, WATCH, framed(health_pb2.HealthCheckRequest().SerializeToString()))
    peer.pipeline.models.not_ready = "tables.safetensors: changed"
    for _ in range(2):
        peer.connection.check_time(perf_counter())
        peer.take()
    assert (health_statuses(peer, 1), 1 in peer.trailers) == ([1, 2], False)


async def test_health_watch_ends_with_the_drain(peer: GrpcPeer) -> None:
    body = framed(health_pb2.HealthCheckRequest().SerializeToString())
    peer.call(1, WATCH, body)
    assert (health_statuses(peer, 1), 1 in peer.trailers) == ([1], False)
    peer.pipeline.models.not_ready = DRAINING
    peer.connection.shutdown.start_drain()
    peer.take()
    assert health_statuses(peer, 1) == [1, 2]
    assert 1 in peer.trailers


async def test_watch_of_an_unknown_service_does_not_keep_its_name(peer: GrpcPeer) -> None:
    """Watches names that take 4 bytes a character in memory; a client may leave the calls open."""
    name = "n" * 60_000 + "\N{SNAKE}"
    body = framed(health_pb2.HealthCheckRequest(service=name).SerializeToString())
    numbers = range(1, 2 * STREAMS_MAX, 2)
    calls = [peer.call_bytes(one, WATCH, *data_chunks(body), is_end=False) for one in numbers]
    tracemalloc.start()
    try:
        for call in calls:
            peer.connection.receive(call)
            while peer.connection.has_more:
                peer.connection.receive(b"")
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    peer.take()
    assert [health_statuses(peer, number) for number in peer.connection.streams] == (
        [[3]] * STREAMS_MAX
    )
    assert kept_bytes < STREAMS_MAX * STREAM_BYTES


@pytest.mark.parametrize(
    ("path", "code", "kind"),
    [
        (CHECK, 13, "HealthCheckRequest"),
        (WATCH, 13, "HealthCheckRequest"),
        (
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            13,
            "ServerReflectionRequest",
        ),
        ("/inference.GRPCInferenceService/ModelReady", 3, "ModelReadyRequest"),
    ],
)
async def test_malformed_request_without_a_lookup_is_rejected(
    peer: GrpcPeer, path: str, code: int, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    peer.call(1, path, framed(b"\xff\xff"))
    assert peer.status(1)[0] == code
    assert f"not a {kind}" in peer.status(1)[1]
    assert caplog.records == []
    peer.call(3, EMBED, framed(MESSAGE))
    await peer.wait_for_end(3)
    assert peer.status(3) == (0, "")
