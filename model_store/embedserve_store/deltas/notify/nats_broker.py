"""Notifications over NATS: one subject for each line. JetStream keeps the newest of each.

A writer adds to the stream, which confirms it, and creates it if there is none. A server subscribes
to the subject itself, which has the same messages and needs no consumer in the stream.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from math import ceil
from typing import Any

from nats.aio.client import Client
from nats.errors import ProtocolError, SecureConnRequiredError
from nats.js.api import DiscardPolicy, StreamConfig
from nats.js.errors import NotFoundError
from nats.protocol.parser import Parser

from embedserve_store.deltas.notify.broker import (
    ANSWER_BYTES_MAX,
    CONNECT_S_MAX,
    IDLE_S,
    KEPT_S,
    NOTIFICATIONS_MAX,
    Topic,
)
from embedserve_store.deltas.notify.broker_url import BrokerUrl

STREAM = "embedserve_deltas"
SUBJECTS = "embedserve.deltas.>"
STREAM_BYTES_MAX = 64 << 20
"""Bytes of notifications of all lines; 64 MiB are a million."""


_CONFIG = StreamConfig(
    name=STREAM,
    subjects=[SUBJECTS],
    discard=DiscardPolicy.OLD,
    max_msgs_per_subject=NOTIFICATIONS_MAX,
    max_age=KEPT_S,
    max_bytes=STREAM_BYTES_MAX,
)


class _BoundedParser(Parser):
    """nats-py's parser, which reads messages of any size, with a limit."""

    async def parse(self, data: bytes = b"") -> None:
        if len(self.buf) + len(data) > ANSWER_BYTES_MAX:
            raise ProtocolError
        try:
            await super().parse(data)
        except Exception as error:  # nats-py would log each, and end without closing the connection
            raise ProtocolError from error


class _TlsClient(Client):
    """nats-py's client, which would log in without TLS if the broker does not ask for TLS."""

    def _connect_command(self) -> bytes:
        if not self._server_info.get("tls_required"):
            raise SecureConnRequiredError
        return super()._connect_command()


class NatsBroker:
    """A connection to NATS."""

    def __init__(self, url: BrokerUrl) -> None:
        self._url = url
        self._client = _TlsClient() if url.is_tls else Client()
        self._client._ps = _BoundedParser(self._client)
        self._is_connecting = self._is_ended = False
        self._limit: asyncio.Timeout | None = None
        self._received = asyncio.Event()  # a message, or the end
        self._error: Exception | None = None
        self._has_stream = False
        self._found: set[Topic] = set()
        self._again: set[Topic] = set()

    async def connect(self) -> None:
        options: dict[str, Any] = {}
        if self._url.is_tls:
            options = {"tls": ssl.create_default_context(), "tls_hostname": self._url.host}
        if self._url.password:
            options |= {"user": self._url.user, "password": self._url.password}
        elif self._url.user:
            options["token"] = self._url.user
        self._is_connecting = True
        async with asyncio.timeout(CONNECT_S_MAX):
            await self._client.connect(
                str(self._url),
                allow_reconnect=False,
                connect_timeout=ceil(CONNECT_S_MAX),
                ping_interval=ceil(CONNECT_S_MAX),
                max_outstanding_pings=1,
                error_cb=self._keep_error,
                closed_cb=self._end,
                disconnected_cb=self._end,
                **options,
            )
        self._is_connecting = False

    async def publish(self, topic: Topic, seq: int) -> None:
        self._check()
        stream = self._client.jetstream(timeout=CONNECT_S_MAX)
        async with self._limited():
            if not self._has_stream:  # with subscribers, a publication without one fails silently
                try:
                    await stream.stream_info(STREAM)
                except NotFoundError:
                    await stream.add_stream(_CONFIG)
                self._has_stream = True
            await stream.publish(topic.nats_subject, b"%d" % seq)

    async def subscribe(self, topics: Sequence[Topic]) -> None:
        for topic in topics:
            await self._subscribe(topic)
        await self._flush()

    async def receive(self) -> set[Topic]:
        self._check()
        if self._again:  # what came since the last message is not known
            again, self._again = self._again, set()
            await self.subscribe([*again])
            return again
        with suppress(TimeoutError):
            async with asyncio.timeout(IDLE_S):
                await self._received.wait()
        self._check()
        if not self._found:
            await self._flush()
        self._received.clear()
        self._again, self._found = self._found, set()
        return self._again

    async def close(self) -> None:
        if not self._is_connecting:  # nats-py would wait for a TLS handshake that has failed
            with suppress(Exception):
                async with asyncio.timeout(CONNECT_S_MAX):
                    await self._client.close()
            for subscription in self._client._subs.values():  # left by a close that failed
                subscription._stop_processing()
        transport: Any = self._client._transport
        if transport is not None:
            transport.close()

    async def _subscribe(self, topic: Topic) -> None:
        """Subscribes to one message: the broker does not send the rest of a flood."""
        callback = partial(self._receive, topic)
        subscription = await self._client.subscribe(topic.nats_subject, cb=callback)
        await subscription.unsubscribe(limit=1)

    async def _receive(self, topic: Topic, _: Any) -> None:
        self._found.add(topic)
        self._received.set()

    async def _flush(self) -> None:
        """Returns once the broker has responded."""
        async with self._limited():
            await self._client.flush(timeout=ceil(CONNECT_S_MAX))
        self._check()

    @asynccontextmanager
    async def _limited(self) -> AsyncIterator[None]:
        """Bounds the time of a request. It ends with the connection, which nats-py would not
        notice while it waits for a response."""
        try:
            async with asyncio.timeout(CONNECT_S_MAX) as self._limit:
                yield
        except TimeoutError:
            self._check()
            raise
        finally:
            self._limit = None

    def _check(self) -> None:
        if self._is_ended or self._error is not None:
            raise self._error or ConnectionError("the broker has closed the connection")

    async def _keep_error(self, error: Exception) -> None:
        """Keeps what has failed. nats-py, which would try a connection again until its time is up,
        raises it."""
        self._error = error
        if self._is_connecting:
            raise error

    async def _end(self) -> None:
        self._is_ended = True
        self._received.set()
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())
