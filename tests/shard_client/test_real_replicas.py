"""Tests of lookups on real processes that are killed, restarted or stopped.

Timeouts are generous.
"""

import asyncio
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from server.waiting import until
from shard_client.shards import GrpcShard, grpc_shard

from embedserve.model_names import VersionKey
from embedserve.shard_client import replica
from embedserve.shard_client.part_client import PartClient, PartOptions
from embedserve.shard_client.reply import Reply
from embedserve.shard_client.shard_connection import Address, ConnectionOptions, ShardConnection
from embedserve.shard_client.timer_queue import TimerQueue

KEY = VersionKey("dlrm", 7)
WAIT_S = 120
CALL_S_MAX = 20
"""Timeout in seconds of a call, within the LOOKUP_S_MAX of its lookup.

The client detects a stopped replica in less time, and keeps its connection for longer."""
LOOKUP_S_MAX = 60


@pytest.fixture(autouse=True)
def keep_slow_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "POLLS_UNANSWERED_MAX", WAIT_S)


@asynccontextmanager
async def two_replicas() -> AsyncIterator[tuple[PartClient, list[GrpcShard]]]:
    async with AsyncExitStack() as stack:
        shards = [await stack.enter_async_context(grpc_shard()) for _ in range(2)]
        part = PartClient(
            1,
            4,
            lambda address, *events: ShardConnection(address, ConnectionOptions(), *events),
            PartOptions(call_timeout_s=CALL_S_MAX),
            TimerQueue(time.monotonic, asyncio.get_running_loop().call_later),
        )
        part.expect(KEY, "f7")
        part.set_addresses([("127.0.0.1", shard.port) for shard in shards])
        await until(lambda: part.stats.replicas[KEY] == 2)
        try:
            yield part, shards
        finally:
            part.close()


@pytest.mark.parametrize(
    ("host", "options"),
    [
        ("a..b", ConnectionOptions()),
        ("127.0.0.1", ConnectionOptions(ssl.create_default_context(), ".shard.internal")),
    ],
)
async def test_invalid_host_name_is_reported_and_retried(
    host: str, options: ConnectionOptions
) -> None:
    connects = 0

    def connect_and_count(
        address: Address, on_ready: Callable[[], None], on_end: Callable[[str], None]
    ) -> ShardConnection:
        nonlocal connects
        connects += 1
        return ShardConnection(address, options, on_ready, on_end)

    timers = TimerQueue(time.monotonic, asyncio.get_running_loop().call_later)
    part = PartClient(1, 4, connect_and_count, PartOptions(), timers)
    part.expect(KEY, "f7")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = (host, listening.getsockname()[1])
        part.set_addresses([address])
        await until(lambda: connects >= 3)
        assert part.reasons(KEY)[address].startswith("cannot connect: ")
        part.close()


class Load:
    """Lookups in sequence, several at a time, until it is stopped."""

    def __init__(self, part: PartClient, in_flight: int = 8) -> None:
        self.part = part
        self.replies: list[Reply] = []
        self.slowest_s = 0.0
        self.is_stopped = False
        self.left = in_flight
        self.done = asyncio.Event()
        for _ in range(in_flight):
            self.start()

    def start(self) -> None:
        start_s = time.monotonic()
        message = b"%d" % len(self.replies)

        def on_done(reply: Reply) -> None:
            self.slowest_s = max(self.slowest_s, time.monotonic() - start_s)
            self.replies.append(reply)
            assert reply.status or reply.payload == message
            if not self.is_stopped:
                self.start()
                return
            self.left -= 1
            if not self.left:
                self.done.set()

        self.part.look_up(KEY, (message,), start_s + LOOKUP_S_MAX, on_done)

    async def stop(self) -> list[Reply]:
        """Returns the replies that are not OK."""
        self.is_stopped = True
        await asyncio.wait_for(self.done.wait(), WAIT_S)
        return [reply for reply in self.replies if reply.status]


async def wait_for_replies(load: Load, count: int = 200) -> None:
    target = len(load.replies) + count
    await until(lambda: len(load.replies) >= target)


async def test_killed_replica_loses_no_lookup_and_rejoins() -> None:
    async with two_replicas() as (part, shards):
        load = Load(part)
        await wait_for_replies(load)
        shards[0].process.kill()
        await until(lambda: part.stats.replicas[KEY] == 1)
        await wait_for_replies(load)
        async with grpc_shard(port=shards[0].port):
            await until(lambda: part.stats.replicas[KEY] == 2)
            await wait_for_replies(load)
            assert await load.stop() == []
            part.close()


async def test_stopped_replica_loses_no_lookup_and_rejoins() -> None:
    async with two_replicas() as (part, shards):
        load = Load(part)
        await wait_for_replies(load)
        shards[0].stop()
        await wait_for_replies(load, 1000)
        shards[0].process.send_signal(signal.SIGCONT)
        await wait_for_replies(load)
        assert await load.stop() == []
        assert load.slowest_s < CALL_S_MAX, "no lookup waited for its call's timeout"
        await until(lambda: part.stats.replicas[KEY] == 2)
