"""A connection to one shard, as asyncio protocol, from its connect to its end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, cast

from embedserve.daemon_threads import run_in_daemon_thread
from embedserve.shard_client.call_headers import CallHeaders
from embedserve.shard_client.client_stream import ClientStream, OnReply
from embedserve.shard_client.http2_client import LOST, Http2Client
from embedserve.tracing.trace_context import TRACEPARENT
from embedserve.wire.http2 import frames
from embedserve.wire.http2.header_blocks import encode
from embedserve.wire.http_stream import Headers

SERVICE = "/embedserve.v1.EmbeddingService/"
CONNECT_S_MAX = 5.0
"""Seconds within which a connection must be made, and after that the shard's SETTINGS arrive."""
CHECK_S = 1.0
"""Seconds between two checks of the keep-alive."""
SILENCE_S_MAX = 2.0
"""Seconds without a received byte, while calls are in flight, after which a ping is sent. Each
answered ping doubles them until a call is answered: gRPC's servers close a connection at the fourth
ping between two responses, unless five minutes lie between pings."""
SILENCE_S_LONGEST = 300.0
"""Bound of that doubling."""
PING_S_MAX = 3.0
"""Seconds that a shard may take to answer the ping; then the connection counts as lost."""
KEEPALIVE_PING = b"keep-ali"
RESPONSE_BYTES_MAX = 64 << 20
"""Default limit of a response message in bytes: far more than a batch needs from one part."""
WRITE_BYTES_MAX = 1 << 20
"""Bytes in the transport's buffer above which calls wait; the shard's windows bound them, too."""

Address = tuple[str, int]


def shown(address: Address) -> str:
    """Returns the address as HOST:PORT; IPv6 addresses in brackets."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def look_up_host(host: str, port: int) -> list[Any]:
    """Returns what getaddrinfo finds for a host name. Raises OSError or ValueError.

    uvloop would look it up in one of four threads, which others wait for, and uvloop at its end:
    half a minute for each name if no name server answers.
    """
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    return await run_in_daemon_thread("resolve", look_up)


@dataclass(frozen=True)
class ConnectionOptions:
    """Options of the connections to all shards.

    Attributes:
        ssl_context: TLS context; None: no TLS.
        server_hostname: name that the shard's certificate must have; "": the host's.
        metadata: headers of every call, such as authorization; names in lower case.
        response_bytes_max: limit of a response message.
    """

    ssl_context: ssl.SSLContext | None = None
    server_hostname: str = ""
    metadata: Headers = field(default_factory=list)
    response_bytes_max: int = RESPONSE_BYTES_MAX


class ShardConnection(asyncio.Protocol):
    """A connection to a shard. It connects once; a lost one is replaced by a new object.

    Attributes:
        is_ready: whether calls may begin.
        last_received_s: time.monotonic() when bytes arrived last.
    """

    def __init__(
        self,
        address: Address,
        options: ConnectionOptions,
        on_ready: Callable[[], None],
        on_end: Callable[[str], None],
    ) -> None:
        """Begins to connect.

        Args:
            on_ready: called once, when calls may begin.
            on_end: called once with the reason, when calls may not or no longer begin: the
                connection cannot be made, is lost or drains. Calls that end with the connection
                get their replies afterwards.
        """
        self.address = address
        self.last_received_s = self._start_s = monotonic()
        self._options, self._on_ready, self._on_end = options, on_ready, on_end
        self._client: Http2Client | None = None
        self._transport: asyncio.Transport | None = None
        self.is_ready = self._has_ended = False
        self._pinged_s = 0.0  # of the ping that is not answered; 0: none
        self._replies = 0  # at the last check
        self._silence_s = SILENCE_S_MAX
        self._may_ping = True
        self._timer: asyncio.TimerHandle
        scheme = "http" if options.ssl_context is None else "https"
        self._embed, self._list_models = (
            CallHeaders(shown(address), SERVICE + name, scheme=scheme, metadata=options.metadata)
            for name in ("Embed", "ListModels")
        )
        self._loop = asyncio.get_running_loop()
        self._connecting = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        host, port = self.address
        context = self._options.ssl_context
        name = None if context is None else self._options.server_hostname or host
        open_at = partial(
            self._loop.create_connection, lambda: self, ssl=context, server_hostname=name
        )
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                *others, last = [found[4][0] for found in await look_up_host(host, port)]
                for address in others:
                    with contextlib.suppress(OSError):
                        await open_at(address, port)
                        return
                await open_at(last, port)
        except TimeoutError:
            self._end(f"no connection within {CONNECT_S_MAX:g} s")
            self.connection_lost(None)  # uvloop does not say so of one that was made just then
        except (OSError, ValueError) as error:  # ValueError: the host is no valid name
            self._end(f"cannot connect: {error}")

    # Calls

    @property
    def in_flight(self) -> int:
        """Number of calls in flight."""
        return 0 if self._client is None else self._client.in_flight

    def call(
        self,
        message: Sequence[bytes],
        timeout_s: float,
        on_done: OnReply,
        traceparent: bytes = b"",
    ) -> ClientStream:
        """Calls Embed, on a connection that has become ready. ``on_done`` is called later and
        exactly once, unless the call is cancelled.

        Args:
            message: chunks of the serialized EmbedRequest.
            timeout_s: value of grpc-timeout. The caller cancels the call when it has passed.
            on_done: callback for the reply.
            traceparent: traceparent header; b"" for none.

        Raises:
            ConnectionError: the connection accepts no more calls.
        """
        assert self._client is not None
        block = self._embed.block(timeout_s)
        if traceparent:
            block += encode([(TRACEPARENT, traceparent)])
        return self._client.call(block, message, on_done)

    def list_models(self, timeout_s: float, on_done: OnReply) -> ClientStream:
        """Calls ListModels; like ``call``."""
        assert self._client is not None
        return self._client.call(self._list_models.block(timeout_s), (), on_done)

    def ping(self) -> None:
        """Sends a PING, whose answer sets ``last_received_s``; one at most until CHECK_S after the
        next reply to a call."""
        if self.is_ready and self._may_ping and self._client is not None:
            self._may_ping = False
            self._client.write(frames.ping(KEEPALIVE_PING))

    def finish(self, reason: str) -> None:
        """Accepts no more calls, and closes the connection after those in flight."""
        if self._client is None:
            self._connecting.cancel()
            self._end(reason)
        else:
            self._client.finish(reason)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not of that class
        if self._has_ended:
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=WRITE_BYTES_MAX)
        self._start_s = monotonic()
        limit = self._options.response_bytes_max
        self._client = Http2Client(self._transport.write, limit, self._on_change)
        self._timer = self._loop.call_later(CHECK_S, self._check_time)

    def data_received(self, data: bytes) -> None:
        self.last_received_s = monotonic()
        if self._client is not None:
            self._client.receive(data)

    def pause_writing(self) -> None:
        if self._client is not None:
            self._client.pause()

    def resume_writing(self) -> None:
        if self._client is not None:
            self._client.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._client is not None:
            self._timer.cancel()
            self._client.write = _discard
            self._client.close(f"{LOST}: {exc}" if exc else LOST)

    def _on_change(self) -> None:
        """Passes on the client's new state."""
        client = self._client
        assert client is not None
        if client.is_draining:
            self._end(client.reason)
        elif client.is_begun:
            self.is_ready = True
            self._on_ready()
        if client.is_closed and self._transport is not None:
            client.write = _discard
            self._transport.close()

    def _end(self, reason: str) -> None:
        self.is_ready = False
        if not self._has_ended:
            self._has_ended = True
            self._on_end(reason)

    def _check_time(self) -> None:
        """Sends pings while calls are in flight, and ends a connection that answers none."""
        client = self._client
        assert client is not None
        if client.is_closed:
            assert self._transport is not None
            self._transport.abort()  # the shard has not read the rest
            return
        self._timer = self._loop.call_later(CHECK_S, self._check_time)
        now_s = monotonic()
        if not client.is_begun:
            if now_s - self._start_s > CONNECT_S_MAX:
                client.close(f"no SETTINGS within {CONNECT_S_MAX:g} s")
        else:
            self._keep_alive(client, now_s)

    def _keep_alive(self, client: Http2Client, now_s: float) -> None:
        if client.replies != self._replies:
            self._replies, self._silence_s, self._may_ping = client.replies, SILENCE_S_MAX, True
        elif self._pinged_s and self.last_received_s >= self._pinged_s:
            self._silence_s = min(2 * self._silence_s, SILENCE_S_LONGEST)
        if not client.in_flight or self.last_received_s >= self._pinged_s:
            self._pinged_s = 0.0
        if self._pinged_s:
            if now_s - self._pinged_s > PING_S_MAX:
                client.close(f"no answer to a ping within {PING_S_MAX:g} s")
        elif client.in_flight and now_s - self.last_received_s >= self._silence_s:
            self._pinged_s = now_s
            client.write(frames.ping(KEEPALIVE_PING))


def _discard(data: bytes) -> None:
    """Drops what would be sent on a closed connection."""
