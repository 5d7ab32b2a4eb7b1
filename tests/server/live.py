"""Services over fake engines, and the whole server on free loopback ports in the test's loop."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import httpx
from server.channels import OWN_CONNECTION
from server.fake_engine import FakeEngine

from embedserve.batching.batcher import Batcher
from embedserve.config import Limits, ServeSettings
from embedserve.metrics.metrics import Metrics
from embedserve.models.models import Service
from embedserve.processes import server
from embedserve.processes.ports import claim_ports
from embedserve_proto.embedding_pb2_grpc import EmbeddingServiceStub

IN_THREAD = Limits(inline_bytes_max=0)
"""Every batch runs in the thread, where a fake engine may be slow."""
JSON = "application/json"
PROTOBUF = "application/x-protobuf"


def make_service(
    *engines: FakeEngine,
    executor: Executor,
    limits: Limits | None = None,
    default_model: str | None = None,
) -> Service:
    """What server.build_service makes of restored engines; the first is the default."""
    limits = limits or Limits()
    metrics = Metrics(engine.model for engine in engines)
    batchers = {
        engine.model.name: Batcher(
            engine, engine.model, limits, metrics.models[engine.model.name], executor
        )
        for engine in engines
    }
    default = engines[0].model.name if default_model is None else default_model
    return Service(batchers, default, limits, metrics)


@dataclass
class Live:
    """A running server, and clients of it."""

    service: Service
    http_port: int
    grpc_target: str
    http: httpx.AsyncClient
    channel: grpc.aio.Channel
    stub: EmbeddingServiceStub
    running: asyncio.Task[None]

    def queued(self) -> int:
        """Requests that wait for a batch of the default model."""
        return self.service.metrics.models[self.service.default_model].queued_requests

    def outcomes(self, protocol: str) -> dict[str, int]:
        return dict(self.service.metrics.protocols[protocol].outcomes)


@asynccontextmanager
async def live_server(
    *engines: FakeEngine, limits: Limits | None = None, drain_s: float = 5.0
) -> AsyncIterator[Live]:
    """Runs embedserve.server.run until the block ends, then drains it by SIGTERM."""
    settings = ServeSettings(store="", drain_s=drain_s)
    with ThreadPoolExecutor(1) as executor:
        service = make_service(*engines, executor=executor, limits=limits)
        ports = claim_ports("127.0.0.1", 0, 0)
        ready = asyncio.Event()
        running = asyncio.create_task(server.run(service, settings, ports, ready.set))
        await asyncio.wait_for(ready.wait(), 10)
        target = f"127.0.0.1:{ports.grpc}"
        channel = grpc.aio.insecure_channel(target, options=OWN_CONNECTION)
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports.http}") as http:
                stub = EmbeddingServiceStub(channel)
                yield Live(service, ports.http, target, http, channel, stub, running)
        finally:
            for engine in engines:
                engine.release()
            await channel.close()
            if not running.done():
                signal.raise_signal(signal.SIGTERM)
            await asyncio.wait_for(running, 20)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
