"""Tests of connections to real servers, gRPC's and embedserve's, also killed and stopped ones."""

import asyncio
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority, client_context
from server.fake_engine import FEATURES, FakeEngine
from server.gate import Gate
from server.live import live_server, make_pipeline, serving
from server.waiting import until
from shard_client.shards import MODELS, grpc_shard

from embedserve.shard_client import shard_connection
from embedserve.shard_client.reply import (
    CANCELLED,
    DEADLINE_EXCEEDED,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    Reply,
)
from embedserve.shard_client.shard_connection import ConnectionOptions, ShardConnection, shown
from embedserve.wire.http2 import frames
from embedserve_proto.embedding_pb2 import EmbedRequest, EmbedResponse, ListModelsResponse

WAIT_S = 60


class AwaitedConnection:
    """A connection to a port, by default of this host, whose calls are awaited."""

    def __init__(
        self, port: int, options: ConnectionOptions | None = None, host: str = "127.0.0.1"
    ) -> None:
        self.ready = asyncio.Event()
        self.ended = asyncio.Event()
        self.reason = ""
        self.connection = ShardConnection(
            (host, port), options or ConnectionOptions(), self.ready.set, self._on_end
        )

    def _on_end(self, reason: str) -> None:
        assert not self.ended.is_set()
        self.reason = reason
        self.ended.set()

    async def begin(self) -> ShardConnection:
        await asyncio.wait_for(self.ready.wait(), WAIT_S)
        return self.connection

    async def call(self, *message: bytes, timeout_s: float = WAIT_S) -> Reply:
        return await reply_to(lambda on_done: self.connection.call(message, timeout_s, on_done))

    async def end(self) -> str:
        await asyncio.wait_for(self.ended.wait(), WAIT_S)
        assert not self.connection.is_ready
        return self.reason


async def reply_to(start: Callable[[Callable[[Reply], None]], object]) -> Reply:
    future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
    start(future.set_result)
    assert not future.done()
    return await asyncio.wait_for(future, WAIT_S)


async def test_calls_to_a_grpc_server_are_answered() -> None:
    async with grpc_shard(repeats=1000) as shard:
        options = ConnectionOptions(metadata=[(b"authorization", b"Bearer x")])
        connected = AwaitedConnection(shard.port, options)
        connection = await connected.begin()
        assert await connected.call(b"ab", b"c") == Reply(0, "", b"abc" * 1000)
        large = bytes(range(256)) * 4
        replies = await asyncio.gather(*[connected.call(large) for _ in range(150)])
        assert {reply.payload for reply in replies} == {large * 1000}
        assert await connected.call(b"fail") == Reply(
            RESOURCE_EXHAUSTED, "full: %", retry_after_s=7
        )
        reply = await connected.call(b"metadata")
        assert b"'authorization', value='Bearer x'" in reply.payload
        assert b"traceparent" not in reply.payload
        traceparent = b"00-%s-%s-01" % (b"a" * 32, b"b" * 16)
        reply = await reply_to(
            lambda done: connection.call((b"metadata",), WAIT_S, done, traceparent)
        )
        assert b"'traceparent', value='%s'" % traceparent in reply.payload
        reply = await connected.call(b"left", timeout_s=90)
        assert 90 - WAIT_S < float(reply.payload) <= 90 * 9 / 8
        reply = await reply_to(lambda done: connection.list_models(WAIT_S, done))
        assert reply.payload == MODELS.SerializeToString()
        assert (await connected.call(b"sleep", timeout_s=0.1)).status in (
            DEADLINE_EXCEEDED,
            CANCELLED,
        )
        assert connection.in_flight == 0
        connection.finish("done")
        assert await connected.end() == "done"


async def test_large_requests_to_a_grpc_server_respect_flow_control() -> None:
    async with grpc_shard() as shard:
        connected = AwaitedConnection(shard.port)
        await connected.begin()
        message = bytes(range(256)) * 20_000
        replies = await asyncio.gather(*[connected.call(message) for _ in range(3)])
        assert [reply.payload == message for reply in replies] == [True] * 3
        connected.connection.finish("done")


async def test_killed_shard_fails_its_calls() -> None:
    async with grpc_shard() as shard:
        connected = AwaitedConnection(shard.port)
        await connected.begin()
        call = asyncio.create_task(connected.call(b"sleep"))
        await connected.call(b"x")
        shard.process.kill()
        reply = await call
        assert (reply.status, reply.is_lost) == (UNAVAILABLE, True)
        assert await connected.end() == reply.message
        with pytest.raises(ConnectionError):
            connected.connection.call((b"x",), 1, print)
    rejected = AwaitedConnection(shard.port)
    assert "cannot connect" in await rejected.end()


async def test_connection_to_a_stopped_shard_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHECK_S", "SILENCE_S_MAX", "PING_S_MAX"):
        monkeypatch.setattr(shard_connection, name, 0.1)
    async with grpc_shard() as shard:
        connected = AwaitedConnection(shard.port)
        await connected.begin()
        shard.stop()
        reply = await connected.call(b"x")
        assert reply.message == "no answer to a ping within 0.1 s"
        assert await connected.end() == reply.message


async def test_connection_to_a_slow_shard_that_answers_pings_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checks pings: gRPC's server accepts three before it closes the connection.

    The next ping comes late.
    """
    monkeypatch.setattr(shard_connection, "CHECK_S", 0.01)
    monkeypatch.setattr(shard_connection, "SILENCE_S_MAX", 0.2)
    async with grpc_shard() as shard:
        connected = AwaitedConnection(shard.port)
        connection = await connected.begin()
        call = connection.call((b"sleep",), 2 * WAIT_S, print)
        for _ in range(2):  # responses to pings
            received_s = connection.last_received_s
            while connection.last_received_s == received_s:
                assert connection.is_ready
                await asyncio.sleep(0.01)
        assert connection.is_ready
        call.cancel()
        assert (await connected.call(b"x")).payload == b"x"
        connection.finish("done")


async def test_interval_of_pings_without_replies_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_connection, "CHECK_S", 0.01)
    monkeypatch.setattr(shard_connection, "SILENCE_S_MAX", 0.1)
    pings: list[float] = []

    async def answer_pings(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frames.settings())
        await reader.readexactly(len(frames.PREFACE))
        while head := await reader.read(9):
            kind, payload = head[3], await reader.readexactly(int.from_bytes(head[:3], "big"))
            if kind == frames.PING:
                pings.append(asyncio.get_running_loop().time())
                writer.write(frames.ping(payload, frames.ACK))
        writer.close()

    server = await asyncio.start_server(answer_pings, "127.0.0.1", 0)
    connected = AwaitedConnection(server.sockets[0].getsockname()[1])
    connection = await connected.begin()
    for _ in range(5):
        connection.ping()
    call = connection.call((b"x",), 2 * WAIT_S, print)
    while len(pings) < 4:
        assert connection.is_ready
        await asyncio.sleep(0.01)
    for i, (before, after) in enumerate(pairwise(pings)):
        assert after - before > 0.09 * 2**i
    call.cancel()
    connection.finish("done")
    server.close()


async def test_connection_without_settings_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ShardConnection.connection_made

    def connection_made(self: ShardConnection, transport: asyncio.BaseTransport) -> None:
        monkeypatch.setattr(shard_connection, "CONNECT_S_MAX", 0.1)  # only after connecting
        made(self, transport)

    monkeypatch.setattr(ShardConnection, "connection_made", connection_made)
    monkeypatch.setattr(shard_connection, "CHECK_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        connected = AwaitedConnection(silent.getsockname()[1])
        assert await connected.end() == "no SETTINGS within 0.1 s"


async def test_connection_made_as_its_timeout_ends_logs_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shard_connection, "CONNECT_S_MAX", 0.1)
    monkeypatch.setattr(shard_connection, "CHECK_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        connected = AwaitedConnection(silent.getsockname()[1])
        asyncio.get_running_loop().call_soon(time.sleep, 0.2)  # after its first step
        assert await connected.end() == "no connection within 0.1 s"
        await asyncio.sleep(0.3)  # a few more checks
    assert caplog.records == []


async def test_connection_may_be_closed_while_connecting() -> None:
    connected = AwaitedConnection(1)
    connected.connection.finish("not needed")
    assert await connected.end() == "not needed"


def embed_request(model: str = "") -> bytes:
    message = EmbedRequest(model=model, keys=list(FEATURES)[:1], ids=[1, 2], lengths=[1, 1])
    return message.SerializeToString()


async def test_calls_to_embedserve_are_answered() -> None:
    async with live_server(FakeEngine()) as live:
        connected = AwaitedConnection(int(live.grpc_target.rpartition(":")[2]))
        connection = await connected.begin()
        reply = await reply_to(lambda done: connection.list_models(WAIT_S, done))
        assert ListModelsResponse.FromString(reply.payload).models
        replies = await asyncio.gather(*[connected.call(embed_request()) for _ in range(300)])
        assert len({reply.payload for reply in replies}) == 1
        assert EmbedResponse.FromString(replies[0].payload).batch_size == 2
        unknown = await connected.call(embed_request("none"))
        assert (unknown.status, unknown.payload) == (5, b"")
        connection.call((embed_request(),), WAIT_S, print).cancel()
        assert await connected.call(embed_request()) == replies[0]
        assert connection.in_flight == 0
    assert "closes the connection" in await connected.end()


async def test_calls_to_embedserve_over_tls_check_its_certificate(tmp_path: Path) -> None:
    authority = Authority()
    certificate, key = authority.sign("shard").write(tmp_path, "shard")
    with ThreadPoolExecutor(1) as executor:
        pipeline = make_pipeline(FakeEngine(), executor=executor)
        async with serving(pipeline, tls=(str(certificate), str(key))) as live:
            port = int(live.grpc_target.rpartition(":")[2])
            connected = AwaitedConnection(port, ConnectionOptions(client_context(authority.root)))
            await connected.begin()
            assert (await connected.call(embed_request())).status == 0
            context = client_context(Authority().root)
            untrusting = AwaitedConnection(port, ConnectionOptions(context))
            assert "certificate verify failed" in await untrusting.end()
            connected.connection.finish("done")
            await connected.end()


def test_ipv6_addresses_are_shown_with_brackets() -> None:
    assert shown(("::1", 5)) == "[::1]:5"


async def test_hosts_whose_names_are_not_resolved_hold_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, look_up = Gate(), socket.getaddrinfo
    hang = gate.before(look_up)

    def getaddrinfo(host: str, *args: Any, **options: Any) -> Any:
        return (hang if host == "gone" else look_up)(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    async with grpc_shard() as shard:
        try:
            hanging = [AwaitedConnection(1, host="gone") for _ in range(5)]
            await until(lambda: len(gate.threads) == len(hanging))
            await AwaitedConnection(shard.port, host="localhost").begin()
            assert all(thread.daemon for thread in gate.threads)
        finally:
            for one in hanging:
                one.connection.finish("the test ends")
            gate.opened.set()
