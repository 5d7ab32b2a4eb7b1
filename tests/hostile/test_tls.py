"""Tests of TLS handshakes and records by which clients try to use the server's time or memory."""

import socket
import ssl
import struct
import subprocess
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from hostile.conftest import Bounds, Victim, victim_and_canary
from hostile.peer import WAIT_S_MAX
from hostile.target_server import NARROW

from embedserve.processes.memory_bounds import CONNECTION_BYTES, CONNECTION_TLS_BYTES, FREED_SHARE
from embedserve.wire.tls.handshake import HANDSHAKE_MEMORY_BYTES

victim, canary = victim_and_canary("narrow", has_tls=True)

CONNECTIONS = NARROW.connections_max - 100
HANDSHAKES = 1000
BURSTS = 3
UPDATES = 200
SLACK_KIB = 8 << 10
"""Allowance for the interpreter and malloc, independent of the number of connections."""


def growth_kib(connection_bytes: int) -> int:
    return SLACK_KIB + int((1 + FREED_SHARE) * CONNECTIONS * connection_bytes) // 1024


@pytest.fixture
def tls(victim: Victim) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=victim.root)


Connect = Callable[[], socket.socket]


@pytest.fixture
def connect(victim: Victim, unharmed: Bounds) -> Connect:
    """Returns a function that opens a connection, which ends with the test."""

    def connect() -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", victim.http_port), WAIT_S_MAX)
        unharmed.peers.append(sock)
        return sock

    return connect


def client_hello(tls: ssl.SSLContext) -> bytes:
    outgoing = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        tls.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


def wait_for_end(sock: socket.socket) -> bytes:
    """Returns all bytes that arrive until the server ends the connection."""
    chunks = []
    try:
        while chunk := sock.recv(1 << 16):
            chunks.append(chunk)
    except ConnectionResetError:
        pass
    return b"".join(chunks)


@pytest.mark.growth(growth_kib(CONNECTION_BYTES + HANDSHAKE_MEMORY_BYTES))
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0], ids=["nothing", "half a hello", "a hello alone"])
def test_incomplete_handshakes_hold_bounded_memory(
    connect: Connect, tls: ssl.SSLContext, share: float
) -> None:
    """Checks memory: the server computes keys and a signature for each whole ClientHello."""
    sockets = [connect() for _ in range(CONNECTIONS)]
    for sock in sockets:
        data = client_hello(tls)
        sock.sendall(data[: int(share * len(data))])
    if share == 1:
        for sock in sockets:
            assert sock.recv(1 << 16)


def test_thousand_consecutive_handshakes_complete(victim: Victim, tls: ssl.SSLContext) -> None:
    """Completes handshakes and sends nothing more; connected clients get responses meanwhile."""
    for _ in range(HANDSHAKES):
        sock = socket.create_connection(("127.0.0.1", victim.http_port), WAIT_S_MAX)
        with tls.wrap_socket(sock, server_hostname="localhost") as one:
            assert one.version() == "TLSv1.3"


@pytest.mark.growth(growth_kib(CONNECTION_BYTES + HANDSHAKE_MEMORY_BYTES))
def test_bursts_of_client_hellos_are_answered(connect: Connect, tls: ssl.SSLContext) -> None:
    """Sends ClientHellos, which cost the client nothing and the server a signature."""
    data = client_hello(tls)
    for _ in range(BURSTS):
        sockets = [connect() for _ in range(CONNECTIONS)]
        for sock in sockets:
            sock.sendall(data)
        for sock in sockets:
            assert sock.recv(1 << 16)
            # RST, so that the server releases the connection's memory immediately
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()


@pytest.mark.parametrize(
    "more",
    [b"\x00" * 4096, b"\x16\x03\x03\x40\x00" + bytes(0x4000), b"\x17\x03\x03\x00\x10" + bytes(16)],
    ids=["zeros", "a handshake record", "a record that cannot be decrypted"],
)
def test_garbage_after_the_client_hello_ends_the_connection(
    connect: Connect, tls: ssl.SSLContext, more: bytes
) -> None:
    for _ in range(50):
        sock = connect()
        sock.sendall(client_hello(tls) + more)
        wait_for_end(sock)


def test_half_closed_handshake_ends_the_connection(connect: Connect, tls: ssl.SSLContext) -> None:
    for _ in range(50):
        sock = connect()
        sock.sendall(client_hello(tls))
        sock.shutdown(socket.SHUT_WR)
        wait_for_end(sock)


@pytest.mark.growth(growth_kib(CONNECTION_BYTES + CONNECTION_TLS_BYTES))
def test_open_connections_hold_bounded_memory_after_large_records(
    connect: Connect, tls: ssl.SSLContext
) -> None:
    """Checks memory: OpenSSL keeps the buffers that a large record took."""
    body = b'{"features": {"user": [[1]]}}'.ljust(40_000)
    head = b"POST /embed HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
    with ExitStack() as kept:
        for _ in range(CONNECTIONS):
            one = kept.enter_context(tls.wrap_socket(connect(), server_hostname="localhost"))
            one.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert one.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


class Openssl:
    """A process of ``openssl s_client``, controlled by its one-letter commands."""

    def __init__(self, victim: Victim, *options: str) -> None:
        address = f"127.0.0.1:{victim.http_port}"
        self.process = subprocess.Popen(
            ["openssl", "s_client", "-connect", address, "-CAfile", victim.root, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> "Openssl":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()

    def send_command(self, letter: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(letter + b"\n")
        self.process.stdin.flush()

    def wait_for(self, text: bytes) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if text in line:
                return
        raise AssertionError(f"openssl did not say {text!r}")


def test_renegotiation_is_rejected(victim: Victim) -> None:
    """Checks that a TLS 1.2 client cannot request handshake after handshake on one connection."""
    with Openssl(victim, "-tls1_2") as client:
        client.wait_for(b"Verify return code: 0")
        client.send_command(b"R")
        client.wait_for(b"RENEGOTIATING")
        client.wait_for(b"no renegotiation")


def test_repeated_key_updates_are_accepted(victim: Victim) -> None:
    """Requests many key updates: TLS 1.3 lets a client request new keys of both sides at will."""
    with Openssl(victim, "-tls1_3") as client:
        client.wait_for(b"Verify return code: 0")
        for _ in range(UPDATES):
            client.send_command(b"K")
            client.wait_for(b"KEYUPDATE")
