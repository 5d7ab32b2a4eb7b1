"""Tests of Host on a loopback address: it is an own or an allowed name, never another site's."""

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from certificates import Authority
from server.channels import OWN_CONNECTION
from server.fake_engine import FakeEngine
from server.http2_client import http2_client
from server.live import Live, make_pipeline, serving
from server.raw_http import read_response
from server.waiting import WAIT_S_MAX

from embedserve.access.authenticator import Authenticator
from embedserve.access.grants import hash_of
from embedserve.errors import PermissionDeniedError
from embedserve.wire.allowed_hosts import AllowedHosts
from embedserve_proto import embedding_pb2 as pb
from embedserve_proto.embedding_pb2_grpc import EmbeddingServiceStub

BODY = b'{"features": {"user": [[1]]}}'
EVIL = "evil.example:19202"
OURS = (
    "localhost",
    "LocalHost:8000",
    "localhost.",
    "127.0.0.1",
    "127.0.0.1:8000",
    "127.9.9.9",
    "[::1]",
    "[::1]:8000",
    "embed.example",
    "EMBED.example.:8000",
)
OTHERS = (
    "evil.example",
    EVIL,
    "embed.example.evil.example",
    "localhost.evil.example",
    "10.0.0.1",
    "[::2]",
    "0.0.0.0",
    "localhost:port",
    "evil.example:80:localhost",
    "localhost@evil.example",
    "[localhost]",
    "\xff",
    ".",
)


@asynccontextmanager
async def server(engine: FakeEngine, **options: object) -> AsyncIterator[Live]:
    with ThreadPoolExecutor(1) as executor:
        tokens = options.pop("tokens", None)
        access = None if tokens is None else Authenticator(str(tokens))
        pipeline = make_pipeline(engine, executor=executor, authenticator=access)
        async with serving(pipeline, **options) as live:  # type: ignore[arg-type]
            yield live


async def over_http1(
    port: int | str, host: str | None, target: str, cuts: bool = False
) -> tuple[int, bytes]:
    """Returns the status and the body of the response to a request, sent whole or byte by byte."""
    connect = (
        asyncio.open_unix_connection(port)
        if isinstance(port, str)
        else asyncio.open_connection("127.0.0.1", port)
    )
    reader, writer = await connect
    lines = f"Host: {host}\r\n" if host is not None else ""
    version = "1.0" if host is None else "1.1"
    close = "" if host is None else "Connection: close\r\n" if cuts else ""
    head = f"POST {target} HTTP/{version}\r\n{lines}{close}Content-Length: {len(BODY)}\r\n\r\n"
    data = head.encode("latin-1") + BODY
    try:
        for piece in (data[i : i + 1] for i in range(len(data))) if cuts else [data]:
            writer.write(piece)
            await writer.drain()
        status, _, body = await asyncio.wait_for(read_response(reader), WAIT_S_MAX)
    finally:
        writer.close()
    return status, body


@pytest.mark.parametrize("host", OURS)
def test_allowed_host_names_are_accepted(host: str) -> None:
    AllowedHosts(["Embed.Example"]).check([(b"host", host.encode())])


@pytest.mark.parametrize("host", OTHERS)
def test_other_host_name_is_rejected_and_the_error_names_the_setting(host: str) -> None:
    with pytest.raises(PermissionDeniedError, match="--allowed-host") as raised:
        AllowedHosts(["embed.example"]).check([(b"host", host.encode("latin-1"))])
    assert ascii(host) in raised.value.message
    assert raised.value.field == "Host"


def test_long_host_name_is_shortened_in_the_error() -> None:
    with pytest.raises(PermissionDeniedError) as raised:
        AllowedHosts().check([(b"host", b"e" * 16_000)])
    assert len(raised.value.message) < 300


def test_missing_and_wildcard_host_are_accepted_if_allowed() -> None:
    AllowedHosts().check([(b"accept", b"*/*")])
    AllowedHosts(["*"]).check([(b"host", b"evil.example")])


@pytest.mark.parametrize("target", ["/embed", "/models/shop/embed", "/admin/load", "/health/live"])
async def test_cross_site_request_is_rejected_on_every_port_and_protocol(
    engine: FakeEngine, target: str
) -> None:
    async with server(engine, allowed_hosts=(), management_host="127.0.0.1") as live:
        grpc_port = int(live.grpc_target.rpartition(":")[2])
        for port in (live.http_port, grpc_port, live.management_port):
            for cuts in (False, True):
                status, body = await over_http1(port, EVIL, target, cuts)
                assert status == 403
                assert f"Host is '{EVIL}'" in body.decode()
            async with http2_client(port, EVIL) as client:
                answer = await client.request("POST", target, BODY)
                assert answer.status == 403
                assert b"--allowed-host" in answer.body
        assert live.outcomes("rest")["PERMISSION_DENIED"] == 9


async def test_own_host_names_are_accepted(engine: FakeEngine) -> None:
    async with server(engine, allowed_hosts=("embed.example",)) as live:
        for host in (f"127.0.0.1:{live.http_port}", "localhost", "embed.example", None):
            for cuts in (False, True):
                assert (await over_http1(live.http_port, host, "/embed", cuts))[0] == 200
        for host in ("localhost", "embed.example:1"):
            async with http2_client(live.http_port, host) as client:
                assert (await client.request("POST", "/embed", BODY)).status == 200


async def test_grpc_authority_is_checked(engine: FakeEngine) -> None:
    async with server(engine, allowed_hosts=()) as live:
        await live.stub.ListModels(pb.ListModelsRequest(), timeout=WAIT_S_MAX)
        options = [*OWN_CONNECTION, ("grpc.default_authority", EVIL)]
        async with grpc.aio.insecure_channel(live.grpc_target, options=options) as channel:
            stub = EmbeddingServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.ListModels(pb.ListModelsRequest(), timeout=WAIT_S_MAX)
        assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert EVIL in str(raised.value.details())


async def test_accepted_host_does_not_admit_another_one(engine: FakeEngine) -> None:
    """Checks that cached header blocks and templates apply to their host only."""
    async with server(engine, allowed_hosts=("same.example",)) as live:
        for _ in range(2):
            for host, status in (("same.example", 200), ("evil.example", 403)):
                assert (await over_http1(live.http_port, host, "/embed"))[0] == status


async def test_unix_socket_accepts_any_host(engine: FakeEngine, tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    async with server(engine, allowed_hosts=(), unix=[path]) as live:
        for cuts in (False, True):
            assert (await over_http1(path, EVIL, "/embed", cuts))[0] == 200
        # The headers are equal, and cached from the Unix socket by now.
        assert (await over_http1(live.http_port, EVIL, "/embed"))[0] == 403


async def test_no_host_check_with_tokens_or_tls(engine: FakeEngine, tmp_path: Path) -> None:
    """Checks servers that need no --allowed-host: another site has no token and no certificate."""
    tokens = tmp_path / "tokens"
    tokens.write_text(json.dumps({"name": "ranker", "sha256": hash_of(b"es_ranker")}))
    async with server(engine, allowed_hosts=(), tokens=tokens) as live:
        assert (await over_http1(live.http_port, EVIL, "/embed"))[0] == 401
    certificate, key = map(str, Authority("ours").sign("server").write(tmp_path, "server"))
    async with server(engine, allowed_hosts=(), tls=(certificate, key)) as live:
        response = await live.http.get(
            f"https://127.0.0.1:{live.http_port}/health/live", headers={"Host": EVIL}
        )
        assert response.status_code == 200
