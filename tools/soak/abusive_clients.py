"""Abusive clients, several at a time, in a process of their own.

They repeat the acts of tests/hostile and tools/fuzz while other clients are served.
"""

from __future__ import annotations

import socket
import struct
from collections import Counter, deque
from collections.abc import Callable
from contextlib import closing, suppress
from functools import cache
from multiprocessing.connection import Connection
from random import Random

import numpy as np
from fuzz.corpus import kinds, post_protobuf
from fuzz.mutate import mutated
from hostile import frames as f
from hostile.canary_client import embed_request
from hostile.peer import GREETING, Peer
from hostile.test_floods import FLOODS, PLAIN
from hostile.test_http1 import PIPELINES, send
from hostile.test_windows import greeting
from soak.embeds import ROWS, table
from soak.load import begin
from soak.tally import ClientContext

HELD_MAX = 40
"""Connections that stay open; each further connection closes the oldest."""
PAUSE_S = 0.25
REPORT_EVERY = 8
SMALL_BUFFER = 4096
LARGE_EXAMPLES = 16
"""Examples of a request whose response has 128 KiB."""
RESET = struct.pack("ii", 1, 0)
MIB = 1 << 20


@cache
def flood(name: str) -> bytes:
    return FLOODS[name]()


class AbusiveClients:
    """Performs abusive acts on the server that accepts new connections.

    Attributes:
        done: count of each act; "cut" counts acts that a closed connection ended.
    """

    def __init__(self, site: ClientContext) -> None:
        self.done: Counter[str] = Counter()
        self._site = site
        self._random = site.random
        self._held: deque[Peer | socket.socket] = deque()
        self._dripping: deque[tuple[socket.socket, bytes]] = deque()
        self._kinds = kinds(table())
        self._acts: list[Callable[[], None]] = [
            self.flood,
            self.garbage,
            self.half_a_head,
            self.drip_a_body,
            self.declare_too_much,
            self.leave_answers_unread,
            self.pipeline_unread,
            self.give_windows_by_the_byte,
            self.give_up_large_calls,
            self.hang_up,
        ]

    def act(self) -> None:
        """Performs one act, and sends a byte on each slow connection."""
        one = self._random.choice(self._acts)
        try:
            one()
            self.done[one.__name__.replace("_", " ")] += 1
        except (OSError, AssertionError):
            self.done["cut"] += 1
        for sock, rest in list(self._dripping):
            with suppress(OSError):
                sock.send(rest[:1])
        while len(self._held) > HELD_MAX:
            self._held.popleft().close()
        while len(self._dripping) > HELD_MAX // 4:
            self._dripping.popleft()[0].close()

    def close(self) -> None:
        while self._held:
            self._held.pop().close()
        while self._dripping:
            self._dripping.pop()[0].close()

    def _port(self) -> int:
        return self._site.route[self._random.randrange(2)]

    def _peer(self, greeting: bytes = GREETING, receive_buffer: int | None = None) -> Peer:
        return Peer(self._port(), greeting, receive_buffer=receive_buffer)

    def _socket(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port()), timeout=1)

    def _large(self) -> bytes:
        first = self._random.randrange(ROWS)
        return embed_request(np.arange(first, first + LARGE_EXAMPLES) % ROWS)

    def flood(self) -> None:
        with closing(self._peer(PLAIN)) as peer:
            peer.send(flood(self._random.choice([*FLOODS])))

    def garbage(self) -> None:
        kind = self._random.choice(self._kinds)
        changed = mutated(self._random, self._random.choice(kind.seeds), kind.seeds)
        sock = self._socket()
        self._held.append(sock)
        sock.sendall(kind.wrap(changed))

    def half_a_head(self) -> None:
        sock = self._socket()
        self._held.append(sock)
        sock.sendall(b"POST /embed HTTP/1.1\r\nHost: h\r\nContent-Le")

    def drip_a_body(self) -> None:
        whole = post_protobuf(self._large())
        head, _, body = whole.partition(b"\r\n\r\n")
        sock = self._socket()
        self._dripping.append((sock, body))
        sock.sendall(head + b"\r\n\r\n")

    def declare_too_much(self) -> None:
        sock = self._socket()
        self._held.append(sock)
        sock.sendall(b"POST /embed HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999999\r\n\r\n")

    def leave_answers_unread(self) -> None:
        """Leaves a megabyte of responses unread, with the largest window or with none."""
        peer = self._peer(self._random.choice((GREETING, greeting(0))), SMALL_BUFFER)
        self._held.append(peer)
        for stream in range(1, 17, 2):
            peer.send(f.call(stream, self._large()), reads=False, wait_s=0.1)

    def pipeline_unread(self) -> None:
        sock = socket.socket()
        self._held.append(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        sock.connect(("127.0.0.1", self._port()))
        sock.setblocking(False)
        send(sock, self._random.choice(list(PIPELINES.values())) * 100, MIB)

    def give_windows_by_the_byte(self) -> None:
        peer = self._peer(greeting(1))
        self._held.append(peer)
        peer.send(f.call(1, self._large()))
        for _ in range(16):
            peer.send(f.window_update(1, 1))

    def give_up_large_calls(self) -> None:
        with closing(self._peer()) as peer:
            for stream in range(1, 9, 2):
                peer.send(f.call(stream, self._large()) + f.rst_stream(stream))

    def hang_up(self) -> None:
        """Resets the connection right after a request."""
        with self._socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            sock.sendall(post_protobuf(self._large()))


def run(site: ClientContext, main: Connection, seed: int) -> None:
    """Runs in a process: sends the counts of acts, and None at the end."""
    site.random = Random(f"rude {seed}")
    rude = AbusiveClients(site)
    begin(main)
    count = 0
    while not site.stop.wait(PAUSE_S):
        rude.act()
        count += 1
        if count % REPORT_EVERY == 0:
            main.send(rude.done)
            rude.done = Counter()
    rude.close()
    main.send(rude.done)
    main.send(None)
