"""`embedserve health`: 0 where the server on this host answers, else one line that says why not."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from certificates import Authority
from running_servers import free_port
from server.fake_engine import FakeEngine
from server.live import make_exchange
from server.raw_http import OurServer, our_server
from typer.testing import CliRunner

from embedserve.commands.cli import app
from embedserve.exchange import Exchange
from embedserve.wire.tls.certificates import Certificates, TlsFiles


@pytest.fixture
def exchange(engine: FakeEngine, executor: ThreadPoolExecutor) -> Exchange:
    return make_exchange(engine, executor=executor)


async def told(server: OurServer, *options: str, **settings: str) -> tuple[int, str]:
    """(exit status, what it said) of the command, with the server's settings as variables."""
    variables = {"EMBEDSERVE_HTTP_PORT": str(server.port), "EMBEDSERVE_HOST": "0.0.0.0", **settings}
    done = await asyncio.to_thread(CliRunner().invoke, app, ["health", *options], env=variables)
    return done.exit_code, done.output


async def test_it_tells_who_lives_from_who_is_ready(exchange: Exchange) -> None:
    async with our_server(exchange) as server:
        assert await told(server) == (0, "")
        assert await told(server, "--ready") == (0, "")
        exchange.models.not_ready = "draining"
        assert await told(server) == (0, "")
        status, said = await told(server, "--ready")
    assert status == 1
    assert "/health/ready answered 503" in said
    assert len(said.splitlines()) == 1


async def test_over_tls_and_where_clients_need_certificates(
    exchange: Exchange, tmp_path: Path
) -> None:
    authority = Authority()
    pair = map(str, authority.sign("server").write(tmp_path, "server"))
    files = TlsFiles(*pair)
    root = tmp_path / "root.pem"
    root.write_bytes(authority.root)
    for used in (files, replace(files, client_ca=str(root))):
        async with our_server(exchange, Certificates(used)) as server:
            assert await told(server, EMBEDSERVE_TLS_CERT=files.certificate) == (0, "")
            status, said = await told(server)
            assert (status, "answered 400" in said) == (1, True)
    async with our_server(exchange) as server:
        status, said = await told(server, EMBEDSERVE_TLS_CERT=files.certificate)
    assert status == 1
    assert "SSL" in said


def test_where_nobody_listens() -> None:
    done = CliRunner().invoke(app, ["health", "--http-port", str(free_port())])
    assert done.exit_code == 1
    assert "Connection refused" in done.output
