"""Tests of the clients of grpcio-health-checking and grpcio-reflection."""

from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from interop.lookups import SERVICE, lookup
from interop.tools import ANSWER_S_MAX
from server.channels import OWN_CONNECTION

SERVING = health_pb2.HealthCheckResponse.SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


@pytest.fixture
def channel(target: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(target, options=OWN_CONNECTION) as channel:
        yield channel


@pytest.fixture
def health(channel: grpc.Channel) -> health_pb2_grpc.HealthStub:
    return health_pb2_grpc.HealthStub(channel)


@pytest.mark.parametrize("name", ["", SERVICE])
def test_health_check_returns_serving(health: health_pb2_grpc.HealthStub, name: str) -> None:
    request = health_pb2.HealthCheckRequest(service=name)
    assert health.Check(request, timeout=ANSWER_S_MAX).status == SERVING


def test_health_check_of_an_unknown_service_is_not_found(
    health: health_pb2_grpc.HealthStub,
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(health_pb2.HealthCheckRequest(service="nothing"), timeout=ANSWER_S_MAX)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(("name", "status"), [(SERVICE, SERVING), ("nothing", SERVICE_UNKNOWN)])
def test_health_watch_returns_the_status(
    health: health_pb2_grpc.HealthStub, name: str, status: int
) -> None:
    watch = health.Watch(health_pb2.HealthCheckRequest(service=name), timeout=ANSWER_S_MAX)
    assert next(watch).status == status
    watch.cancel()
    assert watch.code() is grpc.StatusCode.CANCELLED


def test_client_generated_from_reflection_is_answered(channel: grpc.Channel) -> None:
    database = ProtoReflectionDescriptorDatabase(channel)
    assert {SERVICE, "grpc.health.v1.Health"} <= set(database.get_services())
    service = DescriptorPool(database).FindServiceByName(SERVICE)
    method = service.methods_by_name["Embed"]
    request_class, response_class = map(GetMessageClass, (method.input_type, method.output_type))
    embed = channel.unary_unary(
        f"/{service.full_name}/{method.name}",
        request_serializer=request_class.SerializeToString,
        response_deserializer=response_class.FromString,
    )
    requested = lookup(1)
    response = embed(request_class.FromString(requested.body), timeout=ANSWER_S_MAX)
    assert response.SerializeToString(deterministic=True) == requested.response.SerializeToString(
        deterministic=True
    )
