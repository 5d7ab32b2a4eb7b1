"""Tests of the maximum age of connections: clients reconnect, and no request is lost."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import grpc
import httpx
import pytest
from server.channels import OWN_CONNECTION
from server.fake_engine import FakeEngine
from server.live import GRPC_SERVERS, PROTOBUF, live_server, make_pipeline
from server.pipelines import outcomes_of
from server.raw_http import OurServer
from server.waiting import until

from embedserve.config import Limits
from embedserve.wire.connections import Connection
from embedserve.wire.http1.connection import Http1Connection
from embedserve.wire.http2.protocol import Http2Protocol
from embedserve_client import AsyncGrpcEmbedClient
from embedserve_proto import embedding_pb2 as pb
from embedserve_proto.embedding_pb2_grpc import EmbeddingServiceStub

AGES = 5
CALLS = 40
"""Number of calls between two retirements of connections."""
REQUEST = pb.EmbedRequest(keys=["user"], ids=[1], lengths=[1])
ANSWER_S_MAX = 60
LIMITS = Limits()


@pytest.fixture
async def stub(server: OurServer) -> AsyncIterator[EmbeddingServiceStub]:
    target = f"127.0.0.1:{server.port}"
    async with grpc.aio.insecure_channel(target, options=OWN_CONNECTION) as channel:
        yield EmbeddingServiceStub(channel)


def of_kind(server: OurServer, kind: type) -> set[Connection]:
    return {one for one in server.wire.connections if isinstance(one, kind)}


async def embed_repeatedly(stub: EmbeddingServiceStub, count: int) -> None:
    for _ in range(count):
        response = await stub.Embed(REQUEST, timeout=ANSWER_S_MAX)
        assert response.batch_size == 1


async def test_calls_succeed_over_several_connection_ages(
    server: OurServer, stub: EmbeddingServiceStub
) -> None:
    """Retires connections at any moment of concurrent calls; grpcio does not retry failed calls."""
    met: set[Connection] = set()
    for _ in range(AGES):
        calls = [asyncio.create_task(embed_repeatedly(stub, CALLS)) for _ in range(4)]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED, timeout=0.01)
        await until(lambda: of_kind(server, Http2Protocol) - met)
        for connection in of_kind(server, Http2Protocol) - met:
            met.add(connection)
            connection.retire()
        await asyncio.gather(*calls)
    assert len(met) >= AGES
    await until(lambda: not of_kind(server, Http2Protocol) & met)


async def test_python_client_with_two_servers_loses_no_call(
    engine: FakeEngine, executor: ThreadPoolExecutor
) -> None:
    """Lets both servers retire the client's connections, while calls alternate between them."""
    pipelines = [make_pipeline(one, executor=executor) for one in (engine, FakeEngine())]
    async with OurServer(pipelines[0]) as one, OurServer(pipelines[1]) as other:
        target = f"ipv4:127.0.0.1:{one.port},127.0.0.1:{other.port}"
        async with AsyncGrpcEmbedClient(target, timeout_s=ANSWER_S_MAX) as client:

            async def embed() -> None:
                for _ in range(CALLS):
                    await client.embed({"user": [1]})

            for _ in range(AGES):
                calls = [asyncio.create_task(embed()) for _ in range(4)]
                await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED, timeout=0.01)
                for server in (one, other):
                    for connection in of_kind(server, Http2Protocol):
                        connection.retire()
                await asyncio.gather(*calls)
    counts = [outcomes_of(each.metrics.protocols["grpc"])["OK"] for each in pipelines]
    assert sum(counts) == AGES * 4 * CALLS
    assert min(counts) > CALLS


async def test_stream_keeps_its_connection_until_the_client_ends_it(
    server: OurServer, stub: EmbeddingServiceStub
) -> None:
    stream = stub.EmbedStream(timeout=ANSWER_S_MAX)
    await stream.write(REQUEST)
    assert (await stream.read()).batch_size == 1
    (old,) = of_kind(server, Http2Protocol)
    old.retire()
    async with asyncio.timeout(ANSWER_S_MAX):
        while not (others := of_kind(server, Http2Protocol) - {old}):
            await embed_repeatedly(stub, 1)
    (new,) = others
    for _ in range(3):
        await stream.write(REQUEST)
        assert (await stream.read()).batch_size == 1
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF
    assert await stream.code() is grpc.StatusCode.OK
    await until(lambda: of_kind(server, Http2Protocol) == {new})


@pytest.mark.parametrize("path", ["/embed", "/models"])
async def test_http1_connection_is_closed_with_a_response(server: OurServer, path: str) -> None:
    base_url = f"http://127.0.0.1:{server.port}"
    async with httpx.AsyncClient(base_url=base_url, timeout=ANSWER_S_MAX, verify=False) as client:

        async def send_request() -> httpx.Response:
            if path == "/models":
                return await client.get(path)
            content = REQUEST.SerializeToString()
            return await client.post(path, content=content, headers={"content-type": PROTOBUF})

        for _ in range(AGES):
            assert (await send_request()).headers.get("connection") != "close"
            (old,) = of_kind(server, Http1Connection)
            old.retire()
            answer = await send_request()
            assert answer.status_code == 200
            assert answer.headers["connection"] == "close"
            await until(lambda: not of_kind(server, Http1Connection))


async def test_idle_connection_is_not_closed_for_its_age(server: OurServer) -> None:
    """Checks an idle connection: its client may be sending a request.

    A client whose request meets a close does not know whether the server handled it.
    """
    await server.open(b"GET /health/live HTTP/1.1\r\nHost: test\r\n\r\n")
    await until(lambda: of_kind(server, Http1Connection) and not server.connection.is_busy())
    server.connection.retire()
    assert not server.connection.transport.is_closing()


@pytest.mark.parametrize("grpc_server", GRPC_SERVERS)
async def test_connection_age_limit_makes_clients_reconnect(
    engine: FakeEngine, grpc_server: str
) -> None:
    limits = Limits(connection_age_s_max=0.5)
    async with (
        live_server(engine, limits=limits, grpc_server=grpc_server) as live,
        counted(live.grpc_target) as (target, ports),
        grpc.aio.insecure_channel(target, options=OWN_CONNECTION) as channel,
    ):
        async with asyncio.timeout(ANSWER_S_MAX):
            while len(ports) < 3:
                await embed_repeatedly(EmbeddingServiceStub(channel), 1)
        assert set(live.outcomes("grpc")) == {"OK"}


@asynccontextmanager
async def counted(target: str) -> AsyncIterator[tuple[str, list[int]]]:
    """Yields a proxy address for ``target``, and the ports of the connections through the proxy."""
    host, _, port = target.rpartition(":")
    ports: list[int] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ports.append(writer.get_extra_info("peername")[1])
        server_reader, server_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(copy(reader, server_writer), copy(server_reader, writer))

    async with await asyncio.start_server(take, "127.0.0.1") as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", ports
        server.close()
