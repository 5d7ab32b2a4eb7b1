"""Tests of an HTTP/1.1 adversary: one connection's cost is bounded, and others are served."""

import json
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from time import monotonic

import pytest
from hostile.canary_client import anonymous_kib
from hostile.conftest import Victim
from hostile.peer import WAIT_S_MAX

MIB = 1 << 20
STUCK_S = 1.0
"""Seconds after which a server that takes no byte counts as no longer reading."""


@contextmanager
def connected(victim: Victim, receive_buffer: int | None = None) -> Iterator[socket.socket]:
    with socket.socket() as sock:
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.connect(("127.0.0.1", victim.http_port))
        sock.setblocking(False)
        yield sock


def send(sock: socket.socket, chunk: bytes, nbytes_max: int) -> int:
    """Sends ``chunk`` over and over without reading; returns how many bytes the server takes."""
    sent = 0
    rest = memoryview(chunk)
    while sent < nbytes_max:
        if not select.select([], [sock], [], STUCK_S)[1]:
            break
        try:
            count = sock.send(rest)
        except OSError:  # the server closed the connection
            break
        sent += count
        rest = rest[count:] or memoryview(chunk)
    return sent


def read_some(sock: socket.socket) -> bytes:
    """Returns the first bytes that arrive."""
    assert select.select([sock], [], [], WAIT_S_MAX)[0], "no answer"
    return sock.recv(1 << 16)


def read_all(sock: socket.socket) -> bytes:
    """Returns all bytes that arrive until the server closes the connection."""
    received, end = b"", monotonic() + WAIT_S_MAX
    with suppress(ConnectionResetError):
        while True:
            assert monotonic() < end, f"still open after {received[:200]!r}"
            if select.select([sock], [], [], 0.1)[0]:
                data = sock.recv(1 << 16)
                if not data:
                    return received
                received += data
    return received


@pytest.mark.parametrize(
    ("start", "chunk"),
    [
        (b"GET /health/live HTTP/1.1\r\nHost: h\r\nx: ", b"a" * 65536),
        (b"GET /health/live HTTP/1.1\r\nHost: h\r\n", b"x: 1\r\n" * 10_000),
        (b"GET /", b"a" * 65536),
        (b"POST /embed HTTP/1.1\r\nHost: h\r\nx-", b"a" * 65536),
    ],
    ids=["a value", "lines", "a path", "a name"],
)
def test_endless_headers_are_rejected_with_431(victim: Victim, start: bytes, chunk: bytes) -> None:
    """Checks that the server stops at its limit on headers. The sockets take some more bytes, and
    so does the second in which the server discards input.

    Before, the server took all of the bytes, and other clients waited for seconds.
    """
    with connected(victim) as sock:
        sock.send(start)
        send(sock, chunk, 64 * MIB)
        response = read_all(sock)
    if response:  # else the reset at the end of the discarding removed it
        assert response.startswith(b"HTTP/1.1 431 ")
        assert (
            json.loads(response.partition(b"\r\n\r\n")[2])["error"]["code"] == "RESOURCE_EXHAUSTED"
        )


LONG_LINES = {
    "blanks in a value": b"x: a%bb" % (b" " * 15_000),
    "semicolons in Accept": b"accept: " + b";" * 16_000,
    "weights in Accept": b"accept: application/json" + b";q=0.0x" * 2_100,
}


@pytest.mark.parametrize("name", LONG_LINES)
def test_pathological_header_lines_do_not_stall_the_server(victim: Victim, name: str) -> None:
    """Checks for an immediate response, for other clients, too: one request once stopped all
    clients for seconds.
    """
    raw_request = b"POST /embed HTTP/1.1\r\nHost: h\r\n%b\r\nContent-Length: 2\r\n\r\n"
    with connected(victim) as sock:
        for _ in range(3):
            sock.sendall(raw_request % LONG_LINES[name] + b"{}")
            assert read_some(sock).startswith(b"HTTP/1.1 400 ")


PIPELINES = {
    "unknown paths": b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n",
    "health": b"GET /health/live HTTP/1.1\r\nHost: h\r\n\r\n",
    "metrics": b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n",
    "embeds": b"POST /embed HTTP/1.1\r\nHost: h\r\nContent-Length: 31\r\n\r\n"
    b'{"features": {"user": [[1,2]]}}',
    "rejected embeds": b"POST /embed HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\n{",
    "upgrades": b"GET /x HTTP/1.1\r\nHost: h\r\nConnection: upgrade\r\nUpgrade: any\r\n\r\n",
}


@pytest.mark.parametrize("kind", PIPELINES)
def test_unread_responses_stop_the_reading_of_a_pipeline(victim: Victim, kind: str) -> None:
    """Checks that the server reads no further than it responds; it once read 3.9 GB in 25 s."""
    with connected(victim, receive_buffer=4096) as sock:
        assert send(sock, PIPELINES[kind] * 1000, 64 * MIB) < 64 * MIB


def test_connections_with_unread_large_responses_hold_bounded_memory(victim: Victim) -> None:
    """Checks that each connection holds one response, however many it requests."""
    body = json.dumps({"features": {"user": [[1]] * 500}}).encode()
    request = b"POST /embed HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    before_kib = anonymous_kib(victim.pid)
    answer_kib = 500 * 64 * 20 // 1024
    with ExitStack() as stack:
        for _ in range(30):
            sock = stack.enter_context(connected(victim, receive_buffer=4096))
            send(sock, request * 10, 10 * len(request))
        assert anonymous_kib(victim.pid) - before_kib < 30 * 2 * answer_kib


def test_declared_body_over_the_limit_is_rejected_unread(victim: Victim) -> None:
    with connected(victim) as sock:
        sock.send(b"POST /embed HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999999\r\n\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 413 ")


def test_garbage_closes_the_connection(victim: Victim) -> None:
    for garbage in (
        b"\r\n" * 100,
        bytes(1000),
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: h\r\n\r\n",
    ):
        with connected(victim) as sock:
            sock.send(garbage * 50)
            sock.shutdown(socket.SHUT_WR)
            read_all(sock)
