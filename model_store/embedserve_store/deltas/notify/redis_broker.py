"""Notifications in Redis Streams: one stream for each line, which has the seqs of its deltas."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from redis._parsers import _AsyncRESP2Parser
from redis.asyncio import Connection, ConnectionPool, Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import InvalidResponse

from embedserve_store.deltas.notify.broker import (
    ANSWER_BYTES_MAX,
    CONNECT_S_MAX,
    IDLE_S,
    KEPT_S,
    NOTIFICATIONS_MAX,
    Topic,
)
from embedserve_store.deltas.notify.broker_url import BrokerUrl

READ_MAX = 100
"""Entries that are read at once from a stream: of a flood no more is parsed."""
_LINE_BYTES = 64
"""Bytes of memory that a line of a response is counted as, at least."""


class _BoundedParser(_AsyncRESP2Parser):
    """redis-py's parser, which reads responses of any size, with a limit."""

    __slots__ = ("_left",)

    async def read_response(self, *args: Any, **options: Any) -> Any:
        self._left = ANSWER_BYTES_MAX
        return await super().read_response(*args, **options)

    async def _read(self, length: int) -> Any:
        self._spend(length)
        return await super()._read(length)

    async def _readline(self) -> Any:
        line = await super()._readline()
        self._spend(len(line) + _LINE_BYTES)
        return line

    def _spend(self, nbytes: int) -> None:
        self._left -= nbytes
        if nbytes < 0 or self._left < 0:
            raise InvalidResponse(f"a response has more than {ANSWER_BYTES_MAX} bytes")


class RedisBroker:
    """A connection to Redis."""

    def __init__(self, url: BrokerUrl) -> None:
        options: dict[str, Any] = {"ssl_cert_reqs": "required"} if url.is_tls else {}
        self._redis = Redis(
            connection_pool=ConnectionPool(
                connection_class=SSLConnection if url.is_tls else Connection,
                host=url.host,
                port=url.port,
                db=url.db,
                username=url.user or None,
                password=url.password or None,
                protocol=2,
                parser_class=_BoundedParser,
                retry=Retry(NoBackoff(), 0),
                socket_connect_timeout=CONNECT_S_MAX,
                max_connections=1,
                **options,
            )
        )
        self._last: dict[Any, Any] = {}
        self._topics: dict[bytes, Topic] = {}

    async def connect(self) -> None:
        async with asyncio.timeout(CONNECT_S_MAX):
            await self._redis.ping()

    async def publish(self, topic: Topic, seq: int) -> None:
        async with asyncio.timeout(CONNECT_S_MAX), self._redis.pipeline(transaction=False) as both:
            both.xadd(topic.redis_key, {"seq": seq}, maxlen=NOTIFICATIONS_MAX, approximate=True)
            both.expire(topic.redis_key, KEPT_S)
            await both.execute()

    async def subscribe(self, topics: Sequence[Topic]) -> None:
        for topic in topics:
            async with asyncio.timeout(CONNECT_S_MAX):
                newest = await self._redis.xrevrange(topic.redis_key, count=1)
            self._last[topic.redis_key] = newest[0][0] if newest else "0-0"
            self._topics[topic.redis_key.encode()] = topic

    async def receive(self) -> set[Topic]:
        found: Any
        async with asyncio.timeout(IDLE_S + CONNECT_S_MAX):
            found = await self._redis.xread(self._last, count=READ_MAX, block=int(1e3 * IDLE_S))
        for key, entries in found:
            self._last[key.decode()] = entries[-1][0]
        return {self._topics[key] for key, _ in found}

    async def close(self) -> None:
        with suppress(Exception):
            async with asyncio.timeout(CONNECT_S_MAX):
                await self._redis.aclose(close_connection_pool=True)
