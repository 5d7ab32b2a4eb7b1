"""gRPC calls at a fixed rate, whether or not earlier calls are finished; a separate process.

h2load takes twice the CPU time for calls of 0.1 MB, because it writes a body in frames of 16 KB,
one after another. This client writes a whole call from prepared bytes. It respects the server's
flow-control windows and sends one call at a time per connection. It reads frames without decoding
headers: a call that ends with its first headers is a rejection.

    python bench/operations/open_loop.py PORT PATH BODY ANSWER_BYTES CONNECTIONS RATE SECONDS

It prints its figures as JSON. "late" counts calls that never had a free connection.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import sys
import time
from collections import deque
from functools import lru_cache
from pathlib import Path

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 0x1
END_HEADERS = 0x4
FRAME_BYTES_MAX = 16_384
WINDOW_MAX = 2**31 - 1
WINDOW = 65_535
"""Bytes of the initial flow-control window: fixed for a connection, for streams until SETTINGS
change it."""
INITIAL_WINDOW_SIZE = 4
MESSAGES_KEPT = 64
POLL_S = 0.001


def frame(kind: int, flags: int, stream: int, payload: bytes | memoryview = b"") -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


def header_block(path: str, authority: str) -> bytes:
    """Returns a header block for POST over http, whose other fields are literals without indexing
    (RFC 7541)."""

    def text(value: str) -> bytes:
        assert len(value) < 127
        return bytes([len(value)]) + value.encode()

    named = b"\x04" + text(path) + b"\x01" + text(authority)
    return b"\x83\x86" + named + b"\x0f\x10" + text("application/grpc") + b"\0\x02te\x08trailers"


class Calls:
    """Bytes that all connections send, and the outcomes of their calls."""

    def __init__(self, head: bytes, body: bytes, answer_bytes: int) -> None:
        self.head = head
        self.body = memoryview(body)
        self.answer_bytes = answer_bytes
        self.buffer = memoryview(bytearray(512 << 10))
        self.ended = {"ok": 0, "refused": 0, "other": 0}
        self.whole = lru_cache(MESSAGES_KEPT)(
            lambda stream: self.head_of(stream) + self.part(stream, 0, len(body))
        )

    def head_of(self, stream: int) -> bytes:
        return frame(HEADERS, END_HEADERS, stream, self.head)

    def part(self, stream: int, start: int, end: int) -> bytes:
        """Returns the call's DATA frames for the body from ``start`` to ``end``."""
        frames = []
        for at in range(start, end, FRAME_BYTES_MAX):
            payload = self.body[at : min(at + FRAME_BYTES_MAX, end)]
            is_last = at + len(payload) == len(self.body)
            frames.append(frame(DATA, END_STREAM if is_last else 0, stream, payload))
        return b"".join(frames)


class Connection:
    """An HTTP/2 connection with one call at a time."""

    def __init__(self, port: int, calls: Calls) -> None:
        self.calls = calls
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.stream = -1
        self.is_calling = False
        self.is_greeted = False
        self.window, self.stream_window, self.initial_window = WINDOW, WINDOW, WINDOW
        self.sent = self.received = self.skipped = 0
        self.has_begun = False
        self.held = self.unsent = b""
        settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, WINDOW_MAX)
        more = struct.pack(">I", WINDOW_MAX - WINDOW)
        self.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, settings))
        self.write(frame(WINDOW_UPDATE, 0, 0, more))
        self.sock.setblocking(False)

    def write(self, data: bytes) -> None:
        """Writes to the socket; the rest that it does not accept stays in ``unsent``."""
        data = self.unsent + data if self.unsent else data
        try:
            taken = self.sock.send(data)
        except BlockingIOError:
            taken = 0
        self.unsent = data[taken:]

    def is_blocked(self) -> bool:
        """Returns whether the socket still does not accept all written bytes."""
        if self.unsent:
            self.write(b"")
        return bool(self.unsent)

    def call(self) -> None:
        self.stream += 2
        self.is_calling = True
        self.sent = self.received = 0
        self.has_begun = False
        self.stream_window = self.initial_window
        self.send_body()

    def send_body(self) -> None:
        """Sends as much of the body as the flow-control windows allow."""
        size = len(self.calls.body)
        end = min(size, self.sent + max(0, min(self.window, self.stream_window)))
        if not self.has_begun and end == size:
            self.write(self.calls.whole(self.stream))
        else:
            head = b"" if self.has_begun else self.calls.head_of(self.stream)
            if head or end > self.sent:
                self.write(head + self.calls.part(self.stream, self.sent, end))
        self.has_begun = True
        self.window -= end - self.sent
        self.stream_window -= end - self.sent
        self.sent = end

    def read(self) -> bool:
        """Reads from the socket and returns whether a call has ended."""
        buffer, held = self.calls.buffer, len(self.held)
        buffer[:held] = self.held
        count = self.sock.recv_into(buffer[held:])
        if count == 0:
            raise ConnectionError("the server closed a connection")
        was_calling, end = self.is_calling, held + count
        at = min(self.skipped, end)
        self.skipped -= at
        while end - at >= 9:
            word, flags, stream = struct.unpack_from(">IBI", buffer, at)
            kind, after = word & 255, at + 9 + (word >> 8)
            if kind == DATA:
                self.received += word >> 8
                self.skipped = max(0, after - end)
                payload = b""
            elif after > end:
                break
            else:
                payload = bytes(buffer[at + 9 : after])
            self.heard(kind, flags, stream, payload)
            at = min(after, end)
        self.held = bytes(buffer[at:end])
        return was_calling and not self.is_calling

    def heard(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            self.is_greeted = True
            for name, value in struct.iter_unpack(">HI", payload):
                if name == INITIAL_WINDOW_SIZE:
                    self.stream_window += value - self.initial_window
                    self.initial_window = value
            self.write(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self.write(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            if stream == 0:
                self.window += int.from_bytes(payload, "big")
            elif stream == self.stream:
                self.stream_window += int.from_bytes(payload, "big")
            if self.is_calling and self.sent < len(self.calls.body):
                self.send_body()
        elif kind == GOAWAY:
            raise ConnectionError("the server gave a connection up")
        elif self.is_calling and stream == self.stream:
            if kind == RST_STREAM:
                self.end("other")
            elif flags & END_STREAM and kind in (HEADERS, DATA):
                is_whole = self.received >= self.calls.answer_bytes
                self.end("ok" if is_whole else "other" if self.received else "refused")

    def end(self, outcome: str) -> None:
        self.is_calling = False
        self.calls.ended[outcome] += 1


def offer(calls: Calls, port: int, connections: int, rate: float, seconds: float) -> int:
    """Makes calls at ``rate`` for ``seconds``; returns the number of calls that had no
    connection."""
    epoll, by_file = select.epoll(), {}
    for _ in range(connections):
        connection = Connection(port, calls)
        by_file[connection.sock.fileno()] = connection
        epoll.register(connection.sock, select.EPOLLIN)
    while not all(connection.is_greeted for connection in by_file.values()):
        for file, _ in epoll.poll():
            by_file[file].read()
    idle, made, start = deque(by_file.values()), 0, time.perf_counter()
    blocked: set[Connection] = set()
    while (passed := time.perf_counter() - start) < seconds:
        used = blocked  # plus the connections that write now
        while made < int(passed * rate) and idle:
            connection = idle.popleft()
            connection.call()
            used.add(connection)
            made += 1
        for file, _ in epoll.poll(POLL_S):
            connection = by_file[file]
            used.add(connection)
            if connection.read():
                idle.append(connection)
        blocked = {connection for connection in used if connection.is_blocked()}
    return int(rate * seconds) - made


if __name__ == "__main__":
    port, path, file, answer_bytes, connections, rate, seconds = sys.argv[1:]
    block = header_block(path, f"127.0.0.1:{port}")
    calls = Calls(block, Path(file).read_bytes(), int(answer_bytes))
    late = offer(calls, int(port), int(connections), float(rate), float(seconds))
    print(json.dumps({**calls.ended, "late": late}))
