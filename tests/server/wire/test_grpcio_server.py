"""Tests specific to grpcio's server: its port, its stop, and statuses during a drain."""

import asyncio
import gc
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hostile import frames as f
from running_servers import free_port
from server.channels import OWN_CONNECTION
from server.fake_engine import FakeEngine
from server.live import make_pipeline
from server.pipelines import IN_THREAD
from server.waiting import until

from embedserve.pipeline import RequestPipeline
from embedserve.wire import grpcio_server
from embedserve.wire.grpc.service import SERVICE_NAME
from embedserve.wire.grpcio_server import GrpcioServer
from embedserve_client.grpc.calls import KEEPALIVE_MS
from embedserve_proto import embedding_pb2 as pb
from embedserve_proto.embedding_pb2_grpc import EmbeddingServiceStub

REQUEST = pb.EmbedRequest(keys=["tag", "user"], ids=[1, 2, 3, 4], lengths=[1, 2, 1, 0])


@asynccontextmanager
async def started(
    pipeline: RequestPipeline,
) -> AsyncIterator[tuple[GrpcioServer, grpc.aio.Channel]]:
    """Yields a started server, which the test drains, and a channel to it."""
    server = GrpcioServer(pipeline, "127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{server.port}", options=OWN_CONNECTION
    ) as channel:
        yield server, channel


def watch_health(channel: grpc.aio.Channel) -> Any:
    request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
    return health_pb2_grpc.HealthStub(channel).Watch(request)


async def test_health_is_not_serving_while_draining(pipeline: RequestPipeline) -> None:
    async with started(pipeline) as (server, channel):
        watch = watch_health(channel)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        draining = await server.begin_drain(300)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        await draining


async def test_drain_does_not_wait_for_a_health_watch(pipeline: RequestPipeline) -> None:
    """Covers calls that grpcio loses at the moment of the stop, too: they are rare, and end
    alike.
    """
    async with started(pipeline) as (server, channel):
        watch = watch_health(channel)
        await watch.read()
        await asyncio.wait_for(await server.begin_drain(300), 60)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await watch.read()


async def test_drain_waits_for_an_embed_call(
    engine: FakeEngine, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpcio_server, "OTHER_CALLS_S", 0.01)
    pipeline = make_pipeline(engine, executor=executor, limits=IN_THREAD)
    async with started(pipeline) as (server, channel):
        engine.hold()
        call = EmbeddingServiceStub(channel).Embed(REQUEST)
        await until(lambda: engine.lookups)
        draining = await server.begin_drain(300)
        await asyncio.wait((draining,), timeout=0.2)
        engine.release()
        assert (await call).batch_size == 2
        await asyncio.wait_for(draining, 60)


async def test_port_in_use_is_reported(pipeline: RequestPipeline) -> None:
    port = free_port()
    server = GrpcioServer(pipeline, f"127.0.0.1:{port}")
    await server.start()
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port} "):
        GrpcioServer(pipeline, f"127.0.0.1:{port}")
    await (await server.begin_drain(0))


async def test_ending_an_idle_stream_logs_no_error(
    engine: FakeEngine, executor: ThreadPoolExecutor
) -> None:
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    async with started(make_pipeline(engine, executor=executor)) as (server, channel):
        call = EmbeddingServiceStub(channel).EmbedStream()
        await call.write(REQUEST)
        assert (await call.read()).batch_size == 2
        await (await server.begin_drain(300))
        with pytest.raises(grpc.aio.AioRpcError, match="draining before the stop"):
            await call.read()
    gc.collect()  # asyncio reports an unretrieved error when its task is collected
    assert errors == []


async def test_idle_stream_survives_client_pings(
    pipeline: RequestPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sends all pings immediately, and so faster than any interval allows."""
    assert grpcio_server.PING_INTERVAL_MS_MIN < KEEPALIVE_MS
    monkeypatch.setattr(grpcio_server, "PING_INTERVAL_MS_MIN", 0)
    async with started(pipeline) as (server, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        opened = f.headers(1, f.grpc_head(b"EmbedStream"), end=False)
        writer.write(f.PREFACE + f.settings() + opened + b"".join(map(f.ping, range(10))))
        buffer, kinds = bytearray(), list[int]()
        while kinds.count(f.PING) < 10 and f.GOAWAY not in kinds:
            buffer += await reader.read(1 << 16)
            kinds += [frame.type for frame in f.take_frames(buffer)]
        assert f.GOAWAY not in kinds
        writer.close()
        await (await server.begin_drain(0))
