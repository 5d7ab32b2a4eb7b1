"""Tests that log lines about untrusted clients have their true address, over every protocol."""

import asyncio
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from certificates import Authority
from protocols.logs import fields_of
from server.fake_engine import FakeEngine
from server.http2_client import http2_client
from server.live import live_server, make_pipeline, serving
from server.waiting import WAIT_S_MAX, until

from embedserve.access.authenticator import Authenticator
from embedserve.access.client_address import ClientAddresses
from embedserve.access.grants import hash_of

REJECTION_LOG = "rejected with INVALID_ARGUMENT"
FORGED = "198.51.100.9"
CLIENT = "192.0.2.7"


async def test_repeated_header_lines_form_one_list(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Checks two lines of X-Forwarded-For: HAProxy adds its own line after the client's."""
    caplog.set_level(logging.INFO)
    lines = [("X-Forwarded-For", FORGED), ("X-Forwarded-For", CLIENT)]
    async with live_server(engine) as live:
        live.pipeline.addresses = ClientAddresses(["127.0.0.1"])
        body = b'{"features": {"user": [[7]]}}'
        for _ in range(2):
            await live.http.post("/embed", content=body, headers=lines)
        async with http2_client(live.http_port) as client:
            await client.request("POST", "/embed", body, lines)
    assert [fields["address"] for fields in fields_of(caplog, REJECTION_LOG)] == [CLIENT] * 3


@pytest.mark.parametrize("target", ["/embed", "/models", "/metrics"])
async def test_unknown_token_is_logged_with_the_address(
    engine: FakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture, target: str
) -> None:
    caplog.set_level(logging.INFO)
    tokens = tmp_path / "tokens"
    tokens.write_text(json.dumps({"name": "ranker", "sha256": hash_of(b"es_ranker")}))
    method = "POST" if target == "/embed" else "GET"
    with ThreadPoolExecutor(1) as executor:
        pipeline = make_pipeline(
            engine, executor=executor, authenticator=Authenticator(str(tokens))
        )
        pipeline.addresses = ClientAddresses(["127.0.0.1"])
        async with serving(pipeline) as live:
            headers = {"Authorization": "Bearer es_guess", "X-Forwarded-For": CLIENT}
            response = await live.http.request(method, target, headers=headers)
            assert response.status_code == 401
            async with http2_client(live.http_port) as client:
                over_http2 = await client.request(method, target, b"", headers)
            assert over_http2.status == 401
    seen = fields_of(caplog, "rejected with UNAUTHENTICATED: the token is unknown")
    assert [fields["address"] for fields in seen] == [CLIENT] * 2
    assert "es_guess" not in caplog.text


@pytest.mark.parametrize("path", [b"/embed HTTP/1.1\r\n\0", b"/\xff HTTP/1.1"])
async def test_malformed_request_is_logged_with_the_address(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture, path: bytes
) -> None:
    caplog.set_level(logging.INFO)
    async with live_server(engine) as live:
        reader, writer = await asyncio.open_connection("127.0.0.1", live.http_port)
        writer.write(b"GET %b\r\n\r\n" % path)
        assert (await asyncio.wait_for(reader.read(), WAIT_S_MAX)).startswith(b"HTTP/1.1 400 ")
        writer.close()
    (fields,) = fields_of(caplog, REJECTION_LOG)
    assert fields["address"] == "127.0.0.1"


async def test_unix_socket_peer_has_no_address(
    engine: FakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = str(tmp_path / "socket")
    with ThreadPoolExecutor(1) as executor:
        async with serving(make_pipeline(engine, executor=executor), unix=[path]):
            transport = httpx.AsyncHTTPTransport(uds=path)
            async with httpx.AsyncClient(transport=transport, timeout=WAIT_S_MAX) as client:
                body = {"features": {"user": [[7]]}}
                answer = await client.post("http://localhost/embed", json=body)
                assert answer.status_code == 400
    (fields,) = fields_of(caplog, REJECTION_LOG)
    assert fields["address"] == "a Unix socket"


async def test_failed_tls_handshake_is_logged_with_the_address(
    engine: FakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    certificate, key = map(str, Authority("ours").sign("server").write(tmp_path, "server"))
    with ThreadPoolExecutor(1) as executor:
        pipeline = make_pipeline(engine, executor=executor)
        async with serving(pipeline, tls=(certificate, key)) as live:
            reader, writer = await asyncio.open_connection("127.0.0.1", live.http_port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await asyncio.wait_for(reader.read(), WAIT_S_MAX)
            writer.close()
            await until(lambda: bool(fields_of(caplog, "a TLS handshake failed")))
    (fields,) = fields_of(caplog, "a TLS handshake failed: what came is no TLS")
    assert fields == {"address": "127.0.0.1"}
