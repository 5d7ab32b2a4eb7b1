"""A whole server on free loopback ports over fake engines, in the test's event loop."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc
import httpx
from server.channels import OWN_CONNECTION
from server.fake_engine import FakeEngine
from server.pipelines import IN_THREAD, make_pipeline, outcomes_of
from server.waiting import WAIT_S_MAX

from embedserve.config import Limits, ServeSettings
from embedserve.pipeline import RequestPipeline
from embedserve.processes.server import run_server
from embedserve.processes.startup.ports import claim_ports
from embedserve_proto.embedding_pb2_grpc import EmbeddingServiceStub

__all__ = [
    "GRPC_SERVERS",
    "IN_THREAD",
    "JSON",
    "PROTOBUF",
    "Live",
    "live_server",
    "make_pipeline",
    "serving",
]

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
GRPC_SERVERS = ("native", "grpcio")


@dataclass
class Live:
    """A running server, and its clients."""

    pipeline: RequestPipeline
    http_port: int
    grpc_target: str
    http: httpx.AsyncClient
    channel: grpc.aio.Channel
    stub: EmbeddingServiceStub
    running: asyncio.Task[None]
    stop: asyncio.Event
    management_port: int

    def queued(self) -> int:
        """Number of requests that wait for a batch of the default model."""
        return self.pipeline.metrics.models[self.pipeline.models.default_model].count_queue()[0]

    def outcomes(self, protocol: str) -> dict[str, int]:
        return dict(outcomes_of(self.pipeline.metrics.protocols[protocol]))


@asynccontextmanager
async def live_server(
    *engines: FakeEngine,
    limits: Limits | None = None,
    drain_s: float = 5.0,
    grpc_server: str = "native",
) -> AsyncIterator[Live]:
    """Runs a server over ``engines`` until the block ends, then drains it."""
    with ThreadPoolExecutor(1) as executor:
        pipeline = make_pipeline(*engines, executor=executor, limits=limits)
        async with serving(pipeline, drain_s, grpc_server) as live:
            try:
                yield live
            finally:
                for engine in engines:
                    engine.release()


@asynccontextmanager
async def serving(
    pipeline: RequestPipeline,
    drain_s: float = 5.0,
    grpc_server: str = "native",
    management_host: str = "",
    labels: str = "",
    unix: Sequence[str] = (),
    tls: tuple[str, str] = ("", ""),
    allowed_hosts: tuple[str, ...] = ("*",),
) -> AsyncIterator[Live]:
    """Runs a server over ``pipeline`` until the block ends, then drains it. ``unix`` are paths of
    sockets; ``tls`` are the paths of a certificate and its key."""
    settings = ServeSettings(store="", drain_s=drain_s, grpc_server=grpc_server, labels=labels)
    settings = replace(settings, tls_cert=tls[0], tls_key=tls[1], allowed_host=allowed_hosts)
    management = None
    if management_host:
        management = ("127.0.0.1", 0)
        settings = replace(settings, management_port=0, management_host=management_host)
    sockets = [(path, 0o600, "Unix") for path in unix]
    ports = claim_ports("127.0.0.1", 0, 0, management, sockets)
    ready, stop = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(run_server(stop, pipeline, settings, ports, ready.set))
    await asyncio.wait_for(ready.wait(), WAIT_S_MAX)
    target = f"127.0.0.1:{ports.grpc}"
    channel = grpc.aio.insecure_channel(target, options=OWN_CONNECTION)
    try:
        base_url = f"http://127.0.0.1:{ports.http}"
        async with httpx.AsyncClient(base_url=base_url, timeout=WAIT_S_MAX, verify=False) as http:
            stub = EmbeddingServiceStub(channel)
            yield Live(
                pipeline, ports.http, target, http, channel, stub, running, stop, ports.management
            )
    finally:
        await channel.close()
        stop.set()
        await asyncio.wait_for(running, WAIT_S_MAX)
