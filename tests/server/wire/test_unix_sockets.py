"""Tests that Unix sockets accept all that the ports accept: every protocol, tokens, management.

They have no TLS.
"""

import asyncio
import itertools
import json
import os
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc
import httpx
import pytest
from certificates import Authority
from grpc_health.v1 import health_pb2, health_pb2_grpc
from server.channels import OWN_CONNECTION
from server.fake_engine import FakeEngine
from server.live import Live, make_pipeline, serving
from server.python import run_python
from server.waiting import WAIT_S_MAX, until

from embedserve.access.authenticator import Authenticator
from embedserve.access.grants import hash_of
from embedserve.config import Limits
from embedserve.wire.listener import Listener
from embedserve_client import EmbedClient, GrpcEmbedClient, Unauthenticated, Unavailable
from embedserve_client.grpc.client import AsyncGrpcEmbedClient
from embedserve_client.rest.client import AsyncEmbedClient

TOKEN = "es_ranker"
OUT_OF_DESCRIPTORS = """
import asyncio, resource, socket, sys
from embedserve.wire.listener import Listener

async def main():
    taken = asyncio.get_running_loop().create_future()

    class Taken(asyncio.Protocol):
        def connection_made(self, transport):
            taken.set_result(transport)

    sock, client = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    sock.bind(sys.argv[1])
    sock.listen()
    listener = Listener(sock, Taken)
    listener.start()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 1, most[1]))
    client.connect(sys.argv[1])
    while not listener.is_waiting:
        await asyncio.sleep(0)
    print("waits")
    resource.setrlimit(resource.RLIMIT_NOFILE, most)
    (await asyncio.wait_for(taken, 60)).close()
    print("taken")
    await listener.close(0)
    client.close()

asyncio.run(main())
"""


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    return [str(tmp_path / name) for name in ("http.sock", "grpc.sock")]


@pytest.fixture
async def live(
    engine: FakeEngine, executor: ThreadPoolExecutor, tmp_path: Path, paths: list[str]
) -> AsyncIterator[Live]:
    """Runs a server with TLS on its ports, and with tokens."""
    tokens = tmp_path / "tokens"
    line = {"name": "ranker", "sha256": hash_of(TOKEN.encode()), "roles": ["embed", "admin"]}
    tokens.write_text(json.dumps(line))
    certificate, key = Authority().sign("localhost").write(tmp_path, "server")
    pipeline = make_pipeline(engine, executor=executor, authenticator=Authenticator(str(tokens)))
    async with serving(pipeline, unix=paths, tls=(str(certificate), str(key))) as live:
        yield live


@pytest.mark.parametrize("position", [0, 1])
async def test_both_unix_sockets_accept_every_protocol(
    live: Live, paths: list[str], position: int
) -> None:
    address = f"unix:{paths[position]}"

    def embed_over_both() -> list[int]:
        with (
            EmbedClient(address, token=TOKEN, timeout_s=WAIT_S_MAX) as rest,
            GrpcEmbedClient(address, token=TOKEN, timeout_s=WAIT_S_MAX) as rpc,
        ):
            assert rest.models() == rpc.models()
            responses = [rest.embed({"user": [[1], [2]]}), rpc.embed({"user": [[1]]})]
            return [one.batch_size for one in responses]

    assert await asyncio.to_thread(embed_over_both) == [2, 1]
    async with AsyncEmbedClient(
        f"unix://{paths[position]}", token=TOKEN, timeout_s=WAIT_S_MAX
    ) as rest:
        assert (await rest.embed({"user": [[1]]})).batch_size == 1
    async with AsyncGrpcEmbedClient(address, token=TOKEN, timeout_s=WAIT_S_MAX) as rpc:
        assert (await rpc.embed({"user": [[1]]})).batch_size == 1


@pytest.mark.parametrize("is_http2", [False, True])
async def test_management_is_served_as_on_the_ports(
    live: Live, paths: list[str], is_http2: bool
) -> None:
    transport = httpx.AsyncHTTPTransport(uds=paths[0], http1=not is_http2, http2=is_http2)
    async with httpx.AsyncClient(
        base_url="http://localhost", transport=transport, timeout=WAIT_S_MAX
    ) as http:
        assert (await http.get("/health/ready")).status_code == 200
        assert (await http.get("/metrics")).status_code == 401
        allowed = await http.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
        assert "embedserve_requests_total" in allowed.text
        assert allowed.http_version == ("HTTP/2" if is_http2 else "HTTP/1.1")
    async with grpc.aio.insecure_channel(f"unix:{paths[0]}", options=OWN_CONNECTION) as channel:
        response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert response.status == health_pb2.HealthCheckResponse.SERVING


async def test_unix_socket_callers_need_a_token(live: Live, paths: list[str]) -> None:
    async with AsyncEmbedClient(f"unix:{paths[0]}", timeout_s=WAIT_S_MAX) as rest:
        with pytest.raises(Unauthenticated):
            await rest.embed({"user": [[1]]})
    async with AsyncGrpcEmbedClient(
        f"unix:{paths[1]}", token="es_other", timeout_s=WAIT_S_MAX
    ) as rpc:
        with pytest.raises(Unauthenticated):
            await rpc.embed({"user": [[1]]})


async def test_drain_completes_requests_and_removes_the_sockets(
    engine: FakeEngine, executor: ThreadPoolExecutor, paths: list[str]
) -> None:
    engine.hold()
    pipeline = make_pipeline(engine, executor=executor, limits=Limits(inline_bytes_max=0))
    async with (
        serving(pipeline, drain_s=WAIT_S_MAX, unix=paths) as live,
        AsyncEmbedClient(f"unix:{paths[0]}", timeout_s=WAIT_S_MAX) as rest,
        AsyncEmbedClient(f"unix:{paths[0]}", timeout_s=WAIT_S_MAX) as late,
    ):
        call = asyncio.create_task(rest.embed({"user": [[1]]}))
        await until(lambda: engine.lookups)
        live.stop.set()
        await until(lambda: not any(map(os.path.exists, paths)))
        with pytest.raises(Unavailable):
            await late.embed({"user": [[1]]})
        engine.release()
        assert (await call).batch_size == 1


async def test_workers_share_concurrent_connections(paths: list[str]) -> None:
    """Opens connections concurrently, as a client's pool does."""
    accepted: list[list[asyncio.BaseTransport]] = [[], []]

    class AcceptedProtocol(asyncio.Protocol):
        def __init__(self, mine: list[asyncio.BaseTransport]) -> None:
            self._mine = mine

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self._mine.append(transport)

    sock = socket.socket(socket.AF_UNIX)
    sock.bind(paths[0])
    sock.listen(16)
    clients = [socket.socket(socket.AF_UNIX) for _ in range(8)]
    for client in clients:
        client.connect(paths[0])
    shared = zip((sock, sock.dup()), accepted, strict=True)
    workers = [Listener(one, partial(AcceptedProtocol, mine)) for one, mine in shared]
    for worker in workers:
        worker.start()
    await until(lambda: sum(map(len, accepted)) == len(clients))
    assert list(map(len, accepted)) == [4, 4]
    for transport in itertools.chain(*accepted):
        transport.close()
    for worker in workers:
        await worker.close(0)
    for client in clients:
        client.close()


def test_connections_wait_while_descriptors_are_exhausted(paths: list[str]) -> None:
    done = run_python("-c", OUT_OF_DESCRIPTORS, paths[0])
    assert (done.stdout, done.stderr) == ("waits\ntaken\n", "")
