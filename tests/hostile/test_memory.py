"""Tests that the memory of all connections stays within the sum of the limits."""

import select
import socket
from collections.abc import Iterable
from contextlib import closing

import pytest
from hostile import frames as f
from hostile.canary_client import embed_request
from hostile.conftest import Victim, victim_and_canary
from hostile.peer import GREETING
from hostile.target_server import NARROW
from hostile.test_cost import VALUES, Make, features_json, one_id_a_bag

from embedserve.processes.memory_bounds import FREED_SHARE, memory_bytes_max
from embedserve.wire.wire_server import CHECK_BYTES

BOUND_KIB = memory_bytes_max(NARROW) >> 10
HELD_KIB = int((1 + FREED_SHARE) * (NARROW.connection_bytes_max + CHECK_BYTES)) >> 10
TAKEN_S_MAX = 1.0
ANSWER_S_MAX = 60.0
BODY_BYTES = 30 << 20


victim, canary = victim_and_canary("narrow")


def post(body: bytes, kind: bytes, more: bytes = b"", nbytes: int | None = None) -> bytes:
    size = len(body) if nbytes is None else nbytes
    length = b"" if more else b"Content-Length: %d\r\n" % size
    head = b"POST /embed HTTP/1.1\r\nHost: h\r\nContent-Type: %b\r\n%b%b\r\n"
    return head % (kind, more, length) + body


JSON, PROTOBUF = b"application/json", b"application/x-protobuf"
MANY_BAGS = features_json(b'"user":[%b[1]]' % (b"[]," * (VALUES // 2 - 1)))
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNK = b"10000\r\n" + b" " * 65536 + b"\r\n"
STREAMS = range(1, 2 * 128, 2)
KINDS: dict[str, Make] = {
    "JSON answers that are not read": lambda: post(MANY_BAGS, JSON),
    "such answers to chunks": lambda: post(
        b"%x\r\n%b\r\n0\r\n\r\n" % (len(MANY_BAGS), MANY_BAGS), JSON, CHUNKED
    ),
    "protobuf answers that are not read": lambda: post(
        one_id_a_bag(65_536), PROTOBUF + b"\r\nAccept: application/x-protobuf"
    ),
    "bodies that do not come whole": lambda: post(
        bytes(BODY_BYTES - 1), PROTOBUF, nbytes=BODY_BYTES
    ),
    "chunks that do not come whole": lambda: post(CHUNK * 400, PROTOBUF, CHUNKED),
    "heads that do not come whole": lambda: (
        b"GET / HTTP/1.1\r\nHost: h\r\n"
        + b"".join(b"x-%d: %b\r\n" % (i, b"v" * 150) for i in range(90))
    ),
    "pipelines": lambda: post(b'{"features": {"user": [1]}}', JSON) * 1000,
    "streams that do not end": lambda: (
        GREETING + b"".join(f.headers(i, f.grpc_head(b"Embed"), end=False) for i in STREAMS)
    ),
    "messages that do not come whole": lambda: (
        GREETING + b"".join(f.call(i, embed_request(range(500)))[:-1000] for i in STREAMS[:1])
    ),
}


CONNECTIONS = {"JSON answers that are not read": 10, "such answers to chunks": 10}
"""Number of connections of the kinds that take the server a third of a second; 40 of any other
kind. Without limits they would hold gigabytes together."""
ANSWERED = {name for name in KINDS if "answers" in name}


class Attack:
    """Connections of several kinds that send as much as the server takes, and read nothing."""

    def __init__(self, names: Iterable[str], port: int) -> None:
        self._left: dict[socket.socket, memoryview] = {}
        self._awaited: list[socket.socket] = []
        for name in names:
            sent = memoryview(KINDS[name]())
            for _ in range(CONNECTIONS.get(name, 40)):
                sock = socket.create_connection(("127.0.0.1", port))
                sock.setblocking(False)
                self._left[sock] = sent
                if name in ANSWERED:
                    self._awaited.append(sock)
        self._sockets = list(self._left)

    def send(self) -> None:
        """Sends until the server takes no more bytes."""
        while self._left:
            _, writable, _ = select.select([], self._left, [], TAKEN_S_MAX)
            if not writable:
                return
            for sock in writable:
                try:
                    self._left[sock] = self._left[sock][sock.send(self._left[sock]) :]
                except BlockingIOError:
                    continue
                except OSError:  # the server closed it
                    del self._left[sock]
                    continue
                if not self._left[sock]:
                    del self._left[sock]

    def wait(self) -> None:
        """Waits until every response has begun, or its connection has ended."""
        for sock in self._awaited:
            assert select.select([sock], [], [], ANSWER_S_MAX)[0]

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()


@pytest.mark.growth(HELD_KIB)
@pytest.mark.parametrize("kind", ["bodies that do not come whole", "chunks that do not come whole"])
def test_received_bytes_are_bounded_within_one_event_loop_iteration(
    victim: Victim, kind: str
) -> None:
    """Checks the memory although the server may read megabytes per connection in one iteration."""
    with closing(Attack([kind], victim.http_port)) as attack:
        attack.send()


@pytest.mark.growth(BOUND_KIB)
def test_memory_held_by_all_connections_is_bounded(victim: Victim) -> None:
    with closing(Attack(KINDS, victim.http_port)) as attack:
        attack.send()
        attack.wait()
