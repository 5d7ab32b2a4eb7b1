"""Tests of the gRPC client alone: message sizes and channels."""

import asyncio
import os
import socket
import stat
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress

import grpc
import numpy as np
import pytest
from client.fake import RESPONSE_S_MAX, FakeModel, SilentModel, grpc_server, pooled
from running_servers import free_port

from embedserve_client import (
    AsyncGrpcEmbedClient,
    GrpcEmbedClient,
    ServerError,
    TooLarge,
    Unavailable,
)
from embedserve_client.grpc import calls
from embedserve_client.grpc.calls import KEEPALIVE_MS_MAX

# 6 floats an example: just over 4 MiB, grpc's default limit of a message.
LARGE_BATCH = 4 * 2**20 // (6 * 4) + 1


def test_responses_over_grpc_default_limit_are_accepted(grpc_target: str) -> None:
    ids = np.zeros(LARGE_BATCH, dtype=np.int64)
    ids[-1] = 9
    with GrpcEmbedClient(grpc_target) as client:
        result = client.embed({"user": ids}, timeout_s=60)

    assert result.batch_size == LARGE_BATCH
    np.testing.assert_array_equal(result["user"][-1:], pooled("user", [[9]]))


def test_responses_over_the_client_limit_are_rejected(grpc_target: str) -> None:
    with (
        GrpcEmbedClient(grpc_target, receive_bytes_max=1000) as client,
        pytest.raises(TooLarge, match="larger than max"),
    ):
        client.embed({"user": np.zeros(100, dtype=np.int64)})


def test_method_missing_on_the_server_raises_server_error() -> None:
    with ThreadPoolExecutor(max_workers=1) as pool:
        server = grpc.server(pool)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with (
            GrpcEmbedClient(f"127.0.0.1:{port}") as client,
            pytest.raises(ServerError, match=r"^UNIMPLEMENTED: ") as caught,
        ):
            client.embed({"user": [1]})
        server.stop(grace=None).wait()

    assert isinstance(caught.value.__cause__, grpc.RpcError)


@pytest.mark.parametrize("messages", [[], [b"\xff"]])
def test_missing_and_malformed_responses_raise_server_error(messages: list[bytes]) -> None:
    """The server ends the call with status OK."""

    class Broken(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            if call.method.endswith("/Embed"):
                return grpc.unary_stream_rpc_method_handler(lambda request, _: iter(messages))
            return grpc.stream_stream_rpc_method_handler(
                lambda requests, _: (message for request in requests for message in messages)
            )

    async def fail(target: str) -> None:
        async with AsyncGrpcEmbedClient(target) as client:
            with pytest.raises(ServerError):
                await client.embed({"user": [1]})
            with pytest.raises(ServerError):
                await anext(client.embed_stream([{"user": [1]}]))

    with ThreadPoolExecutor(max_workers=2) as pool:
        server = grpc.server(pool, handlers=[Broken()])
        target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        with GrpcEmbedClient(target) as client:
            with pytest.raises(ServerError):
                client.embed({"user": [1]})
            with pytest.raises(ServerError):
                next(client.embed_stream([{"user": [1]}]))
        asyncio.run(fail(target))
        server.stop(grace=None).wait()


def test_closed_client_rejects_calls(grpc_target: str) -> None:
    client = GrpcEmbedClient(grpc_target)
    client.close()

    with pytest.raises(ValueError, match="closed channel"):
        client.embed({"user": [1]})


def test_call_in_flight_fails_when_another_thread_closes_the_client() -> None:
    model = SilentModel()
    with grpc_server(model) as target, ThreadPoolExecutor(max_workers=1) as pool:
        client = GrpcEmbedClient(target, retries=3, timeout_s=RESPONSE_S_MAX)
        pending = pool.submit(client.embed, {"user": [1]})
        assert model.requested.wait(RESPONSE_S_MAX)
        client.close()
        error = pending.exception(RESPONSE_S_MAX)
        model.may_respond.set()
    assert isinstance(error, Unavailable)


async def test_call_in_flight_fails_when_another_task_closes_the_client() -> None:
    """The call fails with a client error; only the task that was cancelled raises
    CancelledError."""
    model = SilentModel()
    with grpc_server(model) as target:
        client = AsyncGrpcEmbedClient(target, retries=3, timeout_s=RESPONSE_S_MAX)
        pending, cancelled = (asyncio.create_task(client.embed({"user": [1]})) for _ in range(2))
        assert await asyncio.to_thread(model.requested.wait, RESPONSE_S_MAX)
        cancelled.cancel()
        await client.close()
        ended = await asyncio.gather(pending, cancelled, return_exceptions=True)
        model.may_respond.set()
    assert list(map(type, ended)) == [Unavailable, asyncio.CancelledError]


@pytest.mark.parametrize(
    ("scheme", "credentials"), [("", grpc.ssl_channel_credentials()), ("https://", None)]
)
def test_credentials_or_https_make_the_channel_use_tls(
    grpc_target: str, scheme: str, credentials: grpc.ChannelCredentials | None
) -> None:
    """The fake speaks plain text, so a TLS channel cannot connect."""
    with (
        GrpcEmbedClient(scheme + grpc_target, credentials=credentials) as client,
        pytest.raises(Unavailable),
    ):
        client.embed({"user": [1]})


def test_calls_are_balanced_over_the_servers_of_a_target() -> None:
    """Checks that a stopped server gets no calls, and gets calls again after its restart."""
    models = FakeModel(), FakeModel()
    with ExitStack() as first, grpc_server(models[1]) as other:
        target = first.enter_context(grpc_server(models[0], free_port()))
        with GrpcEmbedClient(f"ipv4:{target},{other}", retries=5) as client:
            call_until_every_server_was_called(client, models)
            for _ in range(20):
                client.embed({"user": [1]})
            counts = [len(model.requests) for model in models]
            assert min(counts) >= 8
            first.close()
            for _ in range(20):
                client.embed({"user": [1]})
            assert len(models[1].requests) == counts[1] + 20
            with grpc_server(models[0], int(target.rpartition(":")[2])):
                call_until_every_server_was_called(client, models)


def call_until_every_server_was_called(
    client: GrpcEmbedClient, models: Sequence[FakeModel]
) -> None:
    before = [len(model.requests) for model in models]
    end_s = time.monotonic() + RESPONSE_S_MAX
    while any(len(one.requests) == n for one, n in zip(models, before, strict=True)):
        client.embed({"user": [1]})
        assert time.monotonic() < end_s


def test_dns_target_is_resolved(grpc_target: str) -> None:
    with GrpcEmbedClient(f"dns:///{grpc_target}") as client:
        assert client.embed({"user": [1]}).batch_size == 1


def user_timeouts_ms(port: int) -> list[int]:
    """Returns TCP_USER_TIMEOUT of each connection from this process to ``port``."""
    timeouts = []
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
            if one.getpeername()[1:2] == (port,):
                timeouts.append(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    return timeouts


async def test_connections_to_an_unresponsive_host_have_a_tcp_timeout(grpc_target: str) -> None:
    port = int(grpc_target.rpartition(":")[2])
    with GrpcEmbedClient(grpc_target) as client:
        client.models()
        assert set(user_timeouts_ms(port)) == {KEEPALIVE_MS_MAX}
    async with AsyncGrpcEmbedClient(grpc_target, receive_bytes_max=1 << 20) as own_connection:
        await own_connection.models()
        assert set(user_timeouts_ms(port)) == {KEEPALIVE_MS_MAX}


async def test_pings_continue_while_no_data_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "KEEPALIVE_MS", 20)
    pings = asyncio.Semaphore(0)

    async def acknowledge(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Acknowledges SETTINGS and PING frames, and answers no call."""
        await reader.readexactly(len("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
        writer.write(b"\0\0\0\4\0\0\0\0\0")
        with suppress(asyncio.IncompleteReadError), closing(writer):
            while head := await reader.readexactly(9):
                payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
                if head[3:5] in (b"\4\0", b"\6\0"):
                    ack = b"" if head[3] == 4 else payload
                    writer.write(len(ack).to_bytes(3, "big") + head[3:4] + b"\1" + head[5:] + ack)
                    pings.release()

    # Closed without waiting for the connection, which grpc keeps for some time.
    with closing(await asyncio.start_server(acknowledge, "127.0.0.1")) as server:
        port = server.sockets[0].getsockname()[1]
        async with AsyncGrpcEmbedClient(f"127.0.0.1:{port}", timeout_s=None) as client:
            call = asyncio.create_task(client.embed({"user": [1]}))
            for _ in range(6):
                await asyncio.wait_for(pings.acquire(), RESPONSE_S_MAX)
            call.cancel()
