"""Tests of unary gRPC calls, health and reflection, on both gRPC servers."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from server.fake_engine import Bags, FakeEngine
from server.live import GRPC_SERVERS, Live, live_server
from server.waiting import WAIT_S_MAX, until

from embedserve.config import Limits
from embedserve.wire.grpc.service import SERVICE_NAME
from embedserve_proto import embedding_pb2 as pb

BAGS: Bags = {"tag": [[1], [2, 3]], "user": [[4], []]}
REQUEST = pb.EmbedRequest(keys=["tag", "user"], ids=[1, 2, 3, 4], lengths=[1, 2, 1, 0])
LIMITS = Limits(inline_bytes_max=0, body_bytes_max=100_000)


@pytest.fixture(params=GRPC_SERVERS)
def grpc_server(request: pytest.FixtureRequest) -> str:
    server: str = request.param
    return server


async def status_of(call: grpc.aio.UnaryUnaryCall) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), str(caught.value.details())


async def test_unknown_method_is_unimplemented(live: Live) -> None:
    code, _ = await status_of(live.channel.unary_unary(f"/{SERVICE_NAME}/Nothing")(b""))
    assert code is grpc.StatusCode.UNIMPLEMENTED


async def test_models_are_listed_and_described_over_grpc(live: Live) -> None:
    listed = await live.stub.ListModels(pb.ListModelsRequest())
    assert [model.model for model in listed.models] == ["shop", "films"]
    assert listed.default_model == "shop"
    assert await live.stub.GetModel(pb.GetModelRequest(model="films")) == listed.models[1]
    assert (await live.stub.GetModel(pb.GetModelRequest())).model == "shop"
    code, details = await status_of(live.stub.GetModel(pb.GetModelRequest(model="shoes")))
    assert (code, "shop, films" in details) == (grpc.StatusCode.NOT_FOUND, True)


@pytest.mark.parametrize("name", ["", SERVICE_NAME])
async def test_health_is_serving(live: Live, name: str) -> None:
    health = health_pb2_grpc.HealthStub(live.channel)
    response = await health.Check(health_pb2.HealthCheckRequest(service=name))
    assert response.status == health_pb2.HealthCheckResponse.SERVING


async def test_reflection_returns_services_and_descriptors(live: Live) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(live.channel)
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE_NAME),
    ]
    services, contract = [a async for a in stub.ServerReflectionInfo(iter(requests))]
    names = {service.name for service in services.list_services_response.service}
    assert {SERVICE_NAME, "grpc.health.v1.Health"} <= names
    assert contract.file_descriptor_response.file_descriptor_proto == [pb.DESCRIPTOR.serialized_pb]


async def test_full_queue_for_large_requests_admits_a_small_upload(
    engine: FakeEngine,
) -> None:
    limits = Limits(inline_bytes_max=2000, queue_examples_max=1)
    large = pb.EmbedRequest(keys=["user"], ids=[1] * 200, lengths=[200])
    unknown_field = b"\xa2\x06" + bytes([0x80, 0x80, 0x10]) + bytes(1 << 18)
    small = pb.EmbedRequest(keys=["user"], ids=[1], lengths=[1]).SerializeToString()
    engine.hold()
    async with live_server(engine, limits=limits) as live:
        held = [asyncio.ensure_future(live.stub.Embed(large))]
        await until(lambda: engine.lookups)
        held.append(asyncio.ensure_future(live.stub.Embed(large)))
        await until(lambda: live.queued() == 1)
        rejection = await live.http.post("/embed", json={"features": {"user": [1] * 200}})
        assert (
            "for large requests holds 1 examples; 1 more would exceed its limit" in rejection.text
        )
        assert live.pipeline.models.has_full_queue
        embed = live.channel.unary_unary("/embedserve.v1.EmbeddingService/Embed")
        response = pb.EmbedResponse.FromString(
            await embed(small + unknown_field, timeout=WAIT_S_MAX)
        )
        assert response.batch_size == 1
        engine.release()
        await asyncio.gather(*held)
