"""What is grpcio's server alone: its port, its end, and that it answers as REST does."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from server.channels import OWN_CONNECTION
from server.fake_engine import Bags, FakeEngine
from server.live import PROTOBUF, Live, free_port, live_server, make_service

from embedserve.wire.grpc_server import SERVICE_NAME, GrpcServer
from embedserve_proto import embedding_pb2 as pb
from embedserve_proto.embedding_pb2_grpc import EmbeddingServiceStub

BAGS: Bags = {"tag": [[1], [2, 3]], "user": [[4], []]}
REQUEST = pb.EmbedRequest(keys=["tag", "user"], ids=[1, 2, 3, 4], lengths=[1, 2, 1, 0])


@pytest.fixture
async def live(engine: FakeEngine) -> AsyncIterator[Live]:
    async with live_server(engine) as live:
        yield live


async def test_health_is_not_serving_once_draining(engine: FakeEngine, live: Live) -> None:
    server = GrpcServer(live.service, "127.0.0.1:0")
    await server.start()
    await server.stop_being_ready()
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{server.port}", options=OWN_CONNECTION
    ) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
    await server.stop(0)
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_port_in_use_is_said_so(live: Live) -> None:
    port = free_port()
    server = GrpcServer(live.service, f"127.0.0.1:{port}")
    await server.start()
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port} "):
        GrpcServer(live.service, f"127.0.0.1:{port}")
    await server.stop(0)


async def test_rest_and_grpc_answer_the_same_bits(live: Live) -> None:
    weights = {"tag": [[0.1], [2.5, -3.0]], "user": [[1e-3], []]}
    for request, body in (
        (REQUEST, {"features": BAGS}),
        (
            pb.EmbedRequest(
                keys=["tag", "user"],
                ids=[1, 2, 3, 4],
                lengths=[1, 2, 1, 0],
                weights=[0.1, 2.5, -3.0, 1e-3],
            ),
            {"features": BAGS, "weights": weights},
        ),
    ):
        raw = live.channel.unary_unary(f"/{SERVICE_NAME}/Embed")
        over_grpc = await raw(request.SerializeToString())
        headers = {"content-type": PROTOBUF}
        over_rest = await live.http.post(
            "/embed", content=request.SerializeToString(), headers=headers
        )
        assert over_rest.content == over_grpc
        answer = await live.http.post("/embed", content=json.dumps(body))
        as_json = np.array(answer.json()["values"], np.float32)
        assert as_json.tobytes() == pb.EmbedResponse.FromString(over_grpc).values


async def test_ending_an_idle_stream_leaves_no_error_behind(
    engine: FakeEngine, executor: ThreadPoolExecutor
) -> None:
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    server = GrpcServer(make_service(engine, executor=executor), "127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{server.port}", options=OWN_CONNECTION
    ) as channel:
        call = EmbeddingServiceStub(channel).EmbedStream()
        await call.write(REQUEST)
        assert (await call.read()).batch_size == 2
        await server.stop(5)
        with pytest.raises(grpc.aio.AioRpcError, match="draining before the stop"):
            await call.read()
    gc.collect()  # an error that nobody looked at is told when its task is collected
    assert errors == []
