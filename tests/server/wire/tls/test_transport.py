"""Tests that data over TLS equals data without, in any chunks, when held back, and at the end."""

import asyncio
import contextlib
import json
import ssl
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import cast

import grpc
import httpx
import pytest
from certificates import Authority
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from server.channels import OWN_CONNECTION
from server.http2_client import Http2Client
from server.raw_http import OurServer, get, post, read_response
from server.waiting import WAIT_S_MAX, until

from embedserve.config import Limits
from embedserve.wire.connections import FIRST_BYTES_S_MAX, LingeringClose, ProtocolDetector
from embedserve.wire.tls.certificates import Certificates
from embedserve.wire.tls.transport import READ_RECORDS, TlsTransport
from embedserve_proto import embedding_pb2 as pb
from embedserve_proto.embedding_pb2_grpc import EmbeddingServiceStub

BYTES_MAX = 1 << 20
EXAMPLES = 16_000
BODY = json.dumps({"features": {"user": [[1]]}}).encode()
LARGE = json.dumps({"features": {"user": [[1]] * EXAMPLES}}).encode()
LARGE_RESPONSE = "Accept: application/x-protobuf"
LIMITS = Limits(connection_bytes_max=BYTES_MAX)
KEY_UPDATES = 400
UNREAD_UPDATES = 10_000
"""Key updates whose responses fill the buffers of both sockets."""
UPDATE_REQUESTED = b"\x18\0\0\1\1"
HANDSHAKE, APPLICATION_DATA = b"\x16", b"\x17"
TAG_BYTES = 16
KEY_UPDATE_BYTES = 5 + len(UPDATE_REQUESTED + HANDSHAKE) + TAG_BYTES
"""Bytes of the record with a key update."""


def transport_of(writer: asyncio.StreamWriter) -> asyncio.Transport:
    return cast(asyncio.Transport, writer.transport)


async def test_http1_and_grpc_share_one_tls_port(
    server: OurServer, client: ssl.SSLContext, authority: Authority
) -> None:
    url = f"https://localhost:{server.port}"
    async with httpx.AsyncClient(verify=client, base_url=url, timeout=WAIT_S_MAX) as http:
        responses = [(await http.post("/embed", content=BODY)).json() for _ in range(3)]
        assert responses[0]["values"]
        assert responses == [responses[0]] * 3
        assert (await http.get("/models")).status_code == 200
    credentials = grpc.ssl_channel_credentials(authority.root)
    target = f"localhost:{server.port}"
    async with grpc.aio.secure_channel(target, credentials, OWN_CONNECTION) as channel:
        stub = EmbeddingServiceStub(channel)
        request = pb.EmbedRequest(keys=["user"], ids=[1], lengths=[1])
        response = await stub.Embed(request, timeout=WAIT_S_MAX)
        assert response.keys


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_large_request_in_chunks_gets_a_complete_large_response(
    server: OurServer, client: ssl.SSLContext, version: ssl.TLSVersion
) -> None:
    client.minimum_version = client.maximum_version = version
    request = post(LARGE, LARGE_RESPONSE)
    reader, writer = await server.open(context=client)
    for start in range(0, len(request), 10_007):
        writer.write(request[start : start + 10_007])
        await writer.drain()
    status, _, whole = await read_response(reader)
    assert status == 200
    assert len(whole) > EXAMPLES * 32
    writer.write(request)
    assert (await read_response(reader))[2] == whole


async def test_unread_response_waits_unencrypted_and_is_counted(
    server: OurServer, client: ssl.SSLContext
) -> None:
    reader, writer = await server.open(context=client)
    transport_of(writer).pause_reading()
    writer.write(post(LARGE, LARGE_RESPONSE))
    await until(lambda: server.http1() and server.connection.unsent_bytes)
    connection = server.connection
    transport = connection.transport
    assert isinstance(transport, TlsTransport)
    await until(lambda: connection.is_write_paused)
    raw_bytes = transport._raw.get_write_buffer_size()
    assert raw_bytes < 350_000
    assert transport.get_write_buffer_size() > raw_bytes + 100_000
    assert connection.held_bytes + sum(connection.unsent_memory().values()) > EXAMPLES * 32
    transport_of(writer).resume_reading()
    assert len((await read_response(reader))[2]) > EXAMPLES * 32
    await until(lambda: not connection.unsent_bytes and not connection.unsent_memory())
    assert not connection.is_write_paused


async def test_connections_over_the_held_bytes_limit_are_closed(
    server: OurServer, client: ssl.SSLContext
) -> None:
    connections = []
    for _ in range(12):
        reader, writer = await server.open(context=client)
        transport_of(writer).pause_reading()
        writer.write(post(LARGE, LARGE_RESPONSE))
        connections.append((reader, writer))
    await until(lambda: sum(server.outcomes().values()) == 12)
    server.wire._abort_largest()
    held = sum(one.held_bytes + sum(one.unsent_memory().values()) for one in server.http1())
    assert held <= BYTES_MAX
    ends = [await _end_of(*connection) for connection in connections]
    assert "cut" in ends


async def _end_of(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    transport_of(writer).resume_reading()
    try:
        await read_response(reader)
    except (OSError, EOFError):
        return "cut"
    return "whole"


async def test_http2_answers_small_requests_during_a_large_response(
    server: OurServer, client: ssl.SSLContext
) -> None:
    """Sends the small requests once the large response has begun."""
    client.set_alpn_protocols(["h2", "http/1.1"])
    reader, writer = await server.open(context=client)
    assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
    http2 = Http2Client(reader, writer)
    number = http2.send("POST", "/embed", {"accept": "application/x-protobuf"}, is_end=False)
    http2.write(number, LARGE, is_end=True)
    large = await http2.begun_response(number)
    assert not large.is_whole
    for small_number in [http2.post("/embed", BODY) for _ in range(5)]:
        small = await http2.response(small_number)
        assert json.loads(small.body)["values"]
        assert not large.is_whole
    await http2.response(number)
    assert large.status == 200
    assert len(large.body) > EXAMPLES * 32


async def test_last_response_is_complete_and_followed_by_close_notify(
    server: OurServer, client: ssl.SSLContext
) -> None:
    reader, _ = await server.open(get("/health/live", "Connection: close"), client)
    response = await reader.read()  # raises if there is no close_notify
    assert response.startswith(b"HTTP/1.1 200 ")
    reader, _ = await server.open(b"GET / HTTP/1.1\r\nno header\r\n\r\n" + bytes(300_000), client)
    response = await reader.readuntil(b"}")
    assert response.startswith(b"HTTP/1.1 400 ")


async def test_pipelined_requests_are_answered_in_order(
    server: OurServer, client: ssl.SSLContext
) -> None:
    reader, writer = await server.open(context=client)
    bodies = [json.dumps({"features": {"user": [[one]]}}).encode() for one in range(7)]
    writer.write(b"".join(post(body) for body in bodies))
    together = [(await read_response(reader))[2] for _ in bodies]
    alone = []
    for body in bodies:
        writer.write(post(body))
        alone.append((await read_response(reader))[2])
    assert together == alone


@pytest.mark.parametrize("damage", ["flipped", "cut", "plain"])
async def test_invalid_tls_record_ends_only_its_own_connection(
    server: OurServer, client: ssl.SSLContext, damage: str
) -> None:
    other_connection = await server.open(context=client)
    raw_reader, raw_writer, tls, outgoing = await _shake_hands(server, client)
    tls.write(post(BODY))
    record = outgoing.read()
    raw_writer.write(
        {
            "flipped": record[:-1] + bytes([record[-1] ^ 1]),
            "cut": record[:-10],
            "plain": record[:0] + post(BODY),
        }[damage]
    )
    if damage == "cut":
        raw_writer.write_eof()
    while await raw_reader.read(65536):
        pass
    other_connection[1].write(post(BODY))
    assert (await read_response(other_connection[0]))[0] == 200
    await until(lambda: len(server.wire.connections) == 1)
    assert server.outcomes().get("OK") == 1


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
INVALID_RECORD = b"\x17\x03\x03\x00\x20" + bytes(32)


@pytest.mark.parametrize("data", [get("/nothing"), post(BODY), PREFACE], ids=["get", "post", "h2"])
async def test_invalid_record_behind_a_request_ends_the_connection_quietly(
    server: OurServer, client: ssl.SSLContext, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Sends both in one segment, so that the server decrypts them together."""
    reader, writer, tls, outgoing = await _shake_hands(server, client)
    tls.write(data)
    writer.write(outgoing.read() + INVALID_RECORD)
    while await reader.read(65536):
        pass
    await until(lambda: not server.wire.connections)
    assert caplog.records == []


async def test_invalid_record_while_a_last_response_is_sent_ends_the_connection_quietly(
    server: OurServer, client: ssl.SSLContext, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer, tls, outgoing = await _shake_hands(server, client)
    transport_of(writer).pause_reading()
    tls.write(post(LARGE, LARGE_RESPONSE, "Connection: close"))
    writer.write(outgoing.read())
    await until(lambda: any(isinstance(one, LingeringClose) for one in server.wire.connections))
    (connection,) = server.wire.connections
    assert isinstance(connection, LingeringClose)
    writer.write(INVALID_RECORD)
    await until(connection._transport.is_closing)
    transport_of(writer).resume_reading()
    while await reader.read(65536):
        pass
    await until(lambda: not server.wire.connections)
    assert caplog.records == []


async def _shake_hands(
    server: OurServer, client: ssl.SSLContext
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, ssl.SSLObject, ssl.MemoryBIO]:
    """Returns the streams of a TCP connection, its TLS object, and the BIO of bytes to send."""
    reader, writer = await server.open()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = client.wrap_bio(incoming, outgoing, server_hostname="localhost")
    while True:
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            writer.write(outgoing.read())
            incoming.write(await reader.read(65536))
        else:
            break
    writer.write(outgoing.read())
    await until(lambda: any(isinstance(one, ProtocolDetector) for one in server.wire.connections))
    return reader, writer, tls, outgoing


class RecordingTransport(asyncio.Transport):
    """A transport that records the bytes written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def is_closing(self) -> bool:
        return False


class RecordingProtocol(asyncio.Protocol):
    """A protocol that records the bytes that it receives."""

    def __init__(self) -> None:
        self.received = b""

    def data_received(self, data: bytes) -> None:
        self.received += data


@pytest.mark.parametrize("data", [b"", b"x"], ids=["alone", "between records with data"])
async def test_one_iteration_makes_a_bounded_number_of_key_updates(
    certificates: Certificates, client: ssl.SSLContext, tmp_path: Path, data: bytes
) -> None:
    """Requests key updates. Each costs more than 16 KiB of data, and gets a response."""
    client.keylog_filename = str(tmp_path / "keys")
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    protocol, raw = RecordingProtocol(), RecordingTransport()
    tls = certificates.context.wrap_bio(to_server, to_client, server_side=True)
    of_client = client.wrap_bio(to_client, to_server, server_hostname="localhost")
    for one in (of_client, tls, of_client, tls):
        with contextlib.suppress(ssl.SSLWantReadError):
            one.do_handshake()
    to_client.read()
    flood = KeyUpdates(tmp_path / "keys").records(KEY_UPDATES, data)
    transport = TlsTransport(raw, tls, to_server, to_client, protocol)
    transport.begin(flood[:7])
    transport.data_received(flood[7:])
    counts = [0]
    for _ in range(KEY_UPDATES):
        await asyncio.sleep(0)
        counts.append(len(raw.written) // KEY_UPDATE_BYTES)
    assert counts[-1] == KEY_UPDATES - 1  # OpenSSL sends the last response with the next record
    assert max(after - before for before, after in pairwise(counts)) <= READ_RECORDS
    assert protocol.received == KEY_UPDATES * data


async def test_connection_without_first_bytes_ends_although_it_does_not_read(
    server: OurServer, client: ssl.SSLContext, tmp_path: Path
) -> None:
    """Requests key updates without reading the responses to them, and then nothing more."""
    client.keylog_filename = str(tmp_path / "keys")
    _, writer, _, _ = await _shake_hands(server, client)
    transport_of(writer).pause_reading()
    (connection,) = server.wire.connections
    assert isinstance(connection, ProtocolDetector)
    writer.write(KeyUpdates(tmp_path / "keys").records(UNREAD_UPDATES, b""))
    await until(lambda: connection._transport.get_write_buffer_size() > 100_000)
    connection.check_time(perf_counter() + FIRST_BYTES_S_MAX + 1)
    await until(lambda: not server.wire.connections)


class KeyUpdates:
    """Records of a TLS 1.3 client that request key updates (RFC 8446, sections 4.6.3 and 7.2).

    Their cipher is TLS_AES_256_GCM_SHA384, the first that OpenSSL offers.
    """

    def __init__(self, key_log: Path) -> None:
        lines = key_log.read_text().splitlines()
        (secret,) = [one.split()[2] for one in lines if one.startswith("CLIENT_TRAFFIC_SECRET_0 ")]
        self._secret = bytes.fromhex(secret)

    def records(self, count: int, data: bytes) -> bytes:
        """Returns ``count`` key updates, each behind a record with ``data`` if there is any."""
        records = []
        for _ in range(count):
            contents = [data + APPLICATION_DATA] * bool(data) + [UPDATE_REQUESTED + HANDSHAKE]
            cipher, start = AESGCM(self._expand(b"key", 32)), self._expand(b"iv", 12)
            for number, content in enumerate(contents):
                nonce = start[:-1] + bytes([start[-1] ^ number])
                header = b"\x17\x03\x03" + (len(content) + TAG_BYTES).to_bytes(2, "big")
                records.append(header + cipher.encrypt(nonce, content, header))
            self._secret = self._expand(b"traffic upd", len(self._secret))
        return b"".join(records)

    def _expand(self, label: bytes, nbytes: int) -> bytes:
        """Returns HKDF-Expand-Label of the traffic secret, without a context."""
        label = b"tls13 " + label
        info = nbytes.to_bytes(2, "big") + bytes([len(label)]) + label + b"\0"
        return HKDFExpand(hashes.SHA384(), nbytes, info).derive(self._secret)


async def test_client_close_ends_the_connection(server: OurServer, client: ssl.SSLContext) -> None:
    _, writer = await server.open(post(BODY)[:-1], client)
    await until(lambda: server.http1())
    writer.close()
    await asyncio.wait_for(writer.wait_closed(), WAIT_S_MAX)
    await until(lambda: not server.wire.connections)
