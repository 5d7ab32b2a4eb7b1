"""Tests of SIGTERM: accepted requests get responses over both protocols, and the process exits with
0."""

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from server.async_popen import AsyncPopen, start_python
from server.channels import OWN_CONNECTION
from server.fake_engine import FakeEngine
from server.live import GRPC_SERVERS, live_server
from server.metrics.metric_samples import parse_families, sample_value

from embedserve.wire.wire_server import WireServer
from embedserve_proto import embedding_pb2 as pb
from embedserve_proto.embedding_pb2_grpc import EmbeddingServiceStub

SCRIPT = Path(__file__).parents[1] / "drain_server.py"
BODY = b'{"features": {"user": [1]}}'
REQUEST = pb.EmbedRequest(keys=["user"], ids=[1], lengths=[1])
START_S_MAX = 60
STOP_S_MAX = 60
DRAIN_S = 600
"""Seconds, far more than STOP_S_MAX: a server that waits until then fails the test."""
HELD = -1.0
"""Seconds of a lookup; a negative value means that lookups wait until they are released."""
pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture(params=GRPC_SERVERS)
def grpc_server(request: pytest.FixtureRequest) -> str:
    server: str = request.param
    return server


@dataclass
class Process:
    """A server in a process of its own, and clients of it."""

    process: AsyncPopen
    target: str
    http: httpx.AsyncClient
    channel: grpc.aio.Channel

    async def queue_counts(self) -> tuple[int, int]:
        """Returns (requests that wait for a batch, batches that began).

        Leaves no idle connection, because a draining server would wait for its end.
        """
        text = (await self.http.get("/metrics", headers={"Connection": "close"})).text
        families = parse_families(text)
        queued = sample_value(families, "embedserve_queue_requests")
        return int(queued), int(sample_value(families, "embedserve_batch_examples_count"))

    def release_lookups(self) -> None:
        self.process.send_signal(signal.SIGUSR2)

    async def wait_stopped(self) -> int:
        """Returns the exit status, once the process has ended."""
        return await asyncio.wait_for(self.process.wait(), STOP_S_MAX)


@asynccontextmanager
async def server_process(
    grpc_server: str, lookup_s: float = 0, hang_s: float = 0, **options: Any
) -> AsyncIterator[Process]:
    """Runs drain_server.py. ``options`` are those of subprocess.Popen."""
    process = await start_python(SCRIPT, lookup_s, DRAIN_S, grpc_server, hang_s, **options)
    try:
        line = await asyncio.wait_for(process.stdout.readline(), START_S_MAX)
        http_port, grpc_port = line.split()
        url = f"http://127.0.0.1:{int(http_port)}"
        target = f"127.0.0.1:{int(grpc_port)}"
        async with (
            httpx.AsyncClient(base_url=url, timeout=STOP_S_MAX, verify=False) as http,
            grpc.aio.insecure_channel(target, options=OWN_CONNECTION) as channel,
        ):
            yield Process(process, target, http, channel)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def until_queued(server: Process, queued: int) -> None:
    """Returns once one batch runs and ``queued`` requests wait."""
    async with asyncio.timeout(START_S_MAX):
        while await server.queue_counts() != (queued, 1):  # noqa: ASYNC110  another process
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_requests_in_flight_are_answered_before_the_exit(
    grpc_server: str, number: signal.Signals
) -> None:
    async with server_process(grpc_server, HELD) as server:
        stub = EmbeddingServiceStub(server.channel)
        health = health_pb2_grpc.HealthStub(server.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        first = asyncio.create_task(server.http.post("/embed", content=BODY))
        await until_queued(server, queued=0)
        posts = [asyncio.create_task(server.http.post("/embed", content=BODY)) for _ in range(5)]
        calls = [asyncio.ensure_future(stub.Embed(REQUEST)) for _ in range(5)]
        stream = stub.EmbedStream(iter([REQUEST] * 5))
        await until_queued(server, queued=15)
        server.process.send_signal(number)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        server.release_lookups()
        assert [a.status_code for a in await asyncio.gather(first, *posts)] == [200] * 6
        assert [a.batch_size for a in await asyncio.gather(*calls)] == [1] * 5
        assert [a.batch_size async for a in stream] == [1] * 5
        assert await server.wait_stopped() == 0


async def test_new_connections_are_rejected_while_draining(grpc_server: str) -> None:
    async with server_process(grpc_server, HELD) as server:
        running = asyncio.create_task(server.http.post("/embed", content=BODY))
        await until_queued(server, queued=0)
        server.process.send_signal(signal.SIGTERM)
        assert {*await statuses_until_rejected(server)} <= {200, 503}
        assert not running.done()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await EmbeddingServiceStub(server.channel).Embed(REQUEST)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        server.release_lookups()
        assert (await running).status_code == 200
        assert await server.wait_stopped() == 0


async def test_grpcio_port_closes_before_the_http_port_drains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checks the order, because a client that one port rejects would find the other port open, for
    a call that waits."""
    drain = WireServer.drain
    grpc_port_closed = []
    async with live_server(FakeEngine(), grpc_server="grpcio") as live:
        port = int(live.grpc_target.rpartition(":")[2])

        def drain_after_port_check(wire: WireServer, drain_s: float) -> Awaitable[None]:
            grpc_port_closed.append(is_port_closed(port))
            return drain(wire, drain_s)

        monkeypatch.setattr(WireServer, "drain", drain_after_port_check)
        live.stop.set()
        await live.running
    assert grpc_port_closed == [True]


def is_port_closed(port: int) -> bool:
    """Blocks the event loop, so that only other threads can close the port meanwhile."""
    end_s = time.monotonic() + STOP_S_MAX
    while time.monotonic() < end_s:
        try:
            socket.create_connection(("127.0.0.1", port), STOP_S_MAX).close()
        except ConnectionError:
            return True
    return False


async def statuses_until_rejected(server: Process) -> list[int]:
    """Returns the readiness statuses over new connections, until the server accepts no more."""
    statuses = []
    with contextlib.suppress(httpx.TransportError):
        while True:
            async with httpx.AsyncClient(
                base_url=server.http.base_url, timeout=STOP_S_MAX, verify=False
            ) as fresh:
                statuses.append((await fresh.get("/health/ready")).status_code)
    return statuses


async def test_idle_stream_is_ended_by_the_drain(grpc_server: str) -> None:
    async with server_process(grpc_server) as server:
        stream = EmbeddingServiceStub(server.channel).EmbedStream()
        await stream.write(REQUEST)
        assert (await stream.read()).batch_size == 1
        server.process.send_signal(signal.SIGTERM)
        assert await server.wait_stopped() == 0
        await expect_draining(stream)


async def expect_draining(stream: grpc.aio.StreamStreamCall) -> None:
    """Checks that the stream has no further response, and that its status names the server's
    drain."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == "draining before the stop"


async def test_open_stream_answers_accepted_requests_before_it_ends(grpc_server: str) -> None:
    async with server_process(grpc_server, HELD) as server:
        first = asyncio.create_task(server.http.post("/embed", content=BODY))
        await until_queued(server, queued=0)
        stream = EmbeddingServiceStub(server.channel).EmbedStream()
        for _ in range(5):
            await stream.write(REQUEST)
        await until_queued(server, queued=5)
        server.process.send_signal(signal.SIGTERM)
        server.release_lookups()
        assert [(await stream.read()).batch_size for _ in range(5)] == [1] * 5
        await expect_draining(stream)
        assert (await first).status_code == 200
        assert await server.wait_stopped() == 0


async def test_idle_server_exits_before_the_drain_timeout(grpc_server: str) -> None:
    async with server_process(grpc_server) as server:
        assert (await server.http.post("/embed", content=BODY)).status_code == 200
        assert (await EmbeddingServiceStub(server.channel).Embed(REQUEST)).batch_size == 1
        server.process.send_signal(signal.SIGTERM)
        # The server does not wait for drain_s, although both clients keep their connections open.
        assert await server.wait_stopped() == 0
