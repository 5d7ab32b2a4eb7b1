"""Tests that handshakes are counted and timed like connections, and fail quickly."""

import asyncio
import ssl
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import pytest
from certificates import Authority, client_context
from server.raw_http import OurServer, get, read_response
from server.waiting import WAIT_S_MAX, until

from embedserve.config import Limits
from embedserve.pipeline import RequestPipeline
from embedserve.wire.http2.frames import PREFACE
from embedserve.wire.tls.certificates import Certificates, TlsFiles
from embedserve.wire.tls.handshake import HANDSHAKE_BYTES_MAX, HANDSHAKE_S_MAX, Handshake
from embedserve_client import AsyncEmbedClient, Unavailable

CONNECTIONS_MAX = 4
LIVE = get("/health/live")
LIMITS = Limits(connections_max=CONNECTIONS_MAX)


async def read_until_closed(reader: asyncio.StreamReader) -> bytes:
    """Returns the bytes that arrive until the connection ends."""
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


def handshake_outcomes(server: OurServer) -> dict[str, int]:
    """Returns the number of handshakes by outcome."""
    return dict(server.pipeline.metrics.tls.handshakes)


async def is_served(server: OurServer, client: ssl.SSLContext) -> bool:
    reader, writer = await server.open(LIVE, client)
    status, _, _ = await read_response(reader)
    writer.close()
    return status == 200


async def test_silent_connections_are_counted_and_closed_after_the_timeout(
    server: OurServer, client: ssl.SSLContext
) -> None:
    silent = [await server.open() for _ in range(CONNECTIONS_MAX)]
    await until(lambda: len(server.wire.connections) == CONNECTIONS_MAX)
    with pytest.raises((ConnectionError, ssl.SSLError)):
        await server.open(context=client)
    for one in list(server.wire.connections):
        assert isinstance(one, Handshake)
        one.check_time(perf_counter() + HANDSHAKE_S_MAX + 1)
    for reader, _ in silent:
        assert await read_until_closed(reader) == b""
    await until(lambda: not server.wire.connections)
    assert await is_served(server, client)
    assert handshake_outcomes(server) == {"too_late": CONNECTIONS_MAX, "ok": 1}


async def test_plain_http_request_to_a_tls_port_gets_an_explanation(server: OurServer) -> None:
    response = await server.talk(LIVE)
    assert response.startswith(b"HTTP/1.1 400 ")
    assert b"this port takes TLS only" in response
    assert handshake_outcomes(server) == {"no_tls": 1}


OVERSIZED_HELLO = b"\x16\x03\x01\x40\x00\x01\xff\xff\xff" + bytes(0x4000 - 4)


async def test_tls_client_gets_an_ssl_error_from_a_plain_port(
    pipeline: RequestPipeline, client: ssl.SSLContext
) -> None:
    async with OurServer(pipeline) as server:
        with pytest.raises(ssl.SSLError, match=r"WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE"):
            await server.open(context=client)
        await until(lambda: not server.wire.connections)


@pytest.mark.parametrize("nbytes", [110_000, 2 * HANDSHAKE_BYTES_MAX])
async def test_certificate_chain_over_the_limit_is_rejected(
    pipeline: RequestPipeline, files: TlsFiles, authority: Authority, tmp_path: Path, nbytes: int
) -> None:
    """Checks two limits: OpenSSL's of 100 KB, and ours on the bytes of one handshake."""
    root = tmp_path / "clients.pem"
    root.write_bytes(authority.root)
    pair = authority.sign("ranker")
    der = ssl.PEM_cert_to_DER_cert(authority.root.decode())
    chain = replace(pair, certificate=pair.certificate + authority.root * (nbytes // len(der)))
    client = client_context(authority.root, chain.write(tmp_path, "long"))
    async with OurServer(pipeline, Certificates(replace(files, client_ca=str(root)))) as server:
        try:
            reader, _ = await server.open(LIVE, client)
            assert await reader.read() == b""
        except (ssl.SSLError, ConnectionError):
            pass
        await until(lambda: not server.wire.connections)
        assert handshake_outcomes(server).keys() < {"failed", "too_large", "gone"}
        assert await is_served(server, client_context(authority.root, pair.write(tmp_path, "one")))


async def test_python_client_without_the_required_certificate_raises_unavailable(
    pipeline: RequestPipeline, files: TlsFiles, authority: Authority, tmp_path: Path
) -> None:
    """With TLS 1.3 the alert arrives after the client's handshake, as the response."""
    root = tmp_path / "root.pem"
    root.write_bytes(authority.root)
    certificates = Certificates(replace(files, client_ca=str(root)))
    async with (
        OurServer(pipeline, certificates) as server,
        AsyncEmbedClient(f"https://127.0.0.1:{server.port}", ca=root) as client,
    ):
        with pytest.raises(Unavailable, match="certificate required"):
            await client.embed({"user": [1]})


RECORD = b"\x16\x03\x01\x40\x00"
LONGEST_HELLO = RECORD + b"\x01\x01\xff\xff" + bytes(0x4000 - 4) + 8 * (RECORD + bytes(0x4000))
"""A ClientHello that OpenSSL would accept and wait for; our limit comes first."""


@pytest.mark.parametrize(
    ("sent", "outcome"),
    [
        (PREFACE, "no_tls"),
        (b"\0" * 100, "no_tls"),
        (b"SSH-2.0-OpenSSH_9\r\n", "no_tls"),
        (b"\x16\x03\x01\xff\xff" + bytes(70_000), "failed"),
        (OVERSIZED_HELLO, "failed"),
        (LONGEST_HELLO, "too_large"),
        (b"\x16\x03\x01\x00\x02\x01\x00", "gone"),
    ],
    ids=[
        "HTTP/2",
        "zeros",
        "ssh",
        "a long record",
        "a long hello",
        "the longest hello",
        "a short hello",
    ],
)
async def test_invalid_handshake_ends_the_connection(
    server: OurServer, client: ssl.SSLContext, sent: bytes, outcome: str
) -> None:
    reader, writer = await server.open(sent)
    if len(sent) < 10:
        writer.write_eof()
    await read_until_closed(reader)
    writer.close()
    await until(lambda: not server.wire.connections)
    assert handshake_outcomes(server) == {outcome: 1}
    assert await is_served(server, client)


async def test_old_tls_versions_are_rejected(server: OurServer, client: ssl.SSLContext) -> None:
    client.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        client.minimum_version = client.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
        await server.open(context=client)
    assert handshake_outcomes(server) == {"failed": 1}


async def test_client_that_disconnects_during_the_handshake_is_released(
    server: OurServer, client: ssl.SSLContext
) -> None:
    outgoing = ssl.MemoryBIO()
    hello = client.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        hello.do_handshake()
    for _ in range(20):
        reader, writer = await server.open(outgoing.read() or b"\x16\x03\x01")
        writer.transport.abort()
        del reader
    await until(lambda: handshake_outcomes(server).get("gone") and not server.wire.connections)
    assert await is_served(server, client)


async def test_drain_does_not_wait_for_handshakes(
    server: OurServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{Handshake.__module__}.HANDSHAKE_S_MAX", 600)
    reader, _ = await server.open()
    await until(lambda: server.wire.connections)
    await asyncio.wait_for(server.wire.drain(600), WAIT_S_MAX)
    assert await read_until_closed(reader) == b""


async def test_drain_answers_the_request_after_a_handshake_in_flight(
    server: OurServer,
    client: ssl.SSLContext,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Checks a drain with one connection: for a moment the server has none."""
    drains = asyncio.Event()
    monkeypatch.setattr(Handshake, "drain", lambda _: drains.set())  # without its time limit
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = client.wrap_bio(incoming, outgoing, server_hostname="localhost")
    reader, writer = await server.open()
    while not is_handshake_complete(tls):
        writer.write(outgoing.read())
        incoming.write(await reader.read(4096))
    tls.write(LIVE)
    drain = asyncio.create_task(server.wire.drain(60))
    await drains.wait()
    writer.write(outgoing.read())  # includes the end of the handshake
    while received := await reader.read(4096):
        incoming.write(received)
    writer.close()
    await drain
    assert tls.read(4096).startswith(b"HTTP/1.1 200 OK\r\n")
    assert handshake_outcomes(server) == {"ok": 1}
    assert "are cut" not in caplog.text


def is_handshake_complete(tls: ssl.SSLObject) -> bool:
    """Continues a client's handshake; returns whether it is complete on its side."""
    try:
        tls.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
