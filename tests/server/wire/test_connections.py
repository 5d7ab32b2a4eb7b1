"""Tests of a connection's last response: its client gets the time to read it."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import uvloop
from h2.connection import H2Connection
from h2.settings import SettingCodes
from hyperframe.frame import GoAwayFrame, PingFrame
from server.fake_engine import FakeEngine
from server.live import IN_THREAD, PROTOBUF
from server.raw_http import OurServer, post
from server.waiting import WAIT_S_MAX, until
from server.wire.http2.peer import body_of, frames_of, has_ended

from embedserve.pipeline import RequestContext, RequestPipeline
from embedserve.wire import connections
from embedserve.wire.connections import LINGER_S_MAX, Connection, LingeringClose
from embedserve.wire.http1.fast_path import FastPathConnection
from embedserve.wire.http2.connection import Http2Connection
from embedserve.wire.http2.frames import FRAME_HEADER_BYTES, PREFACE, ErrorCode
from embedserve.wire.http2.graceful_shutdown import DRAIN_PING
from embedserve.wire.http2.protocol import Http2Protocol
from embedserve.wire.http_stream import PROGRESS_BYTES_MIN, UNSENT_S_MAX
from embedserve_proto import embedding_pb2 as pb

EXAMPLES = 10_000
LAST_GOAWAY = GoAwayFrame(0, last_stream_id=1).serialize()
WINDOW = 1 << 20
"""Window for a whole response: 160 KB, forty times what the sockets hold."""


LIMITS = IN_THREAD


def requesting_client(examples: int = EXAMPLES, window: int = WINDOW) -> H2Connection:
    """Returns a client that requests more vectors than the sockets hold, and opens its window."""
    client = H2Connection()
    client.initiate_connection()
    client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: window})
    client.increment_flow_control_window(WINDOW)
    head = [(":method", "POST"), (":scheme", "http"), (":path", "/embed"), (":authority", "test")]
    client.send_headers(1, [*head, ("content-type", PROTOBUF)])
    message = pb.EmbedRequest(keys=["user"], ids=[1] * examples, lengths=[1] * examples)
    body = message.SerializeToString()
    while body:
        client.send_data(1, body[:10_000], end_stream=len(body) <= 10_000)
        body = body[10_000:]
    return client


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(FRAME_HEADER_BYTES)
    return head + await reader.readexactly(int.from_bytes(head[:3], "big"))


async def test_late_bytes_do_not_discard_the_last_response(
    server: OurServer, engine: FakeEngine
) -> None:
    """Sends bytes late: the kernel discards unsent bytes if unread bytes remain at the close."""
    client = requesting_client()
    reader, writer = await server.open_held(engine, client.data_to_send())
    drain = asyncio.create_task(server.wire.drain(WAIT_S_MAX))
    writer.write(PingFrame(0, DRAIN_PING, flags=["ACK"]).serialize())
    while not (await read_frame(reader)).startswith(LAST_GOAWAY):
        pass
    engine.release()
    await until(lambda: server.outcomes().get("OK"))
    client.ping(b"too late")
    writer.write(client.data_to_send())
    frames = list(frames_of(await reader.read()))  # up to the end of the server's side
    assert has_ended(frames, 1)
    response = pb.EmbedResponse.FromString(body_of(frames, 1))
    values = np.frombuffer(response.values, "<f4").reshape(EXAMPLES, -1)
    assert np.array_equal(values[:, :4], np.tile(engine.tables["t_user"][1], (EXAMPLES, 1)))
    assert not drain.done()  # the drain waits for the client to close
    writer.close()
    await drain


async def test_connection_is_closed_if_the_client_does_not(server: OurServer) -> None:
    client = H2Connection()
    client.initiate_connection()
    reader, writer = await server.open(client.data_to_send())
    await read_frame(reader)
    drain = asyncio.create_task(server.wire.drain(WAIT_S_MAX))
    await reader.read()
    (connection,) = server.wire.connections
    connection.check_time(perf_counter())
    writer.write(b"and more")
    assert not drain.done()
    connection.check_time(perf_counter() + LINGER_S_MAX)
    await drain


async def test_protocol_violation_is_reported_and_further_input_bounded(
    server: OurServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that the connection stays open at the limit, and that one byte more ends it."""
    monkeypatch.setattr(connections, "LINGER_S_MAX", float("inf"))
    monkeypatch.setattr(connections, "LINGER_BYTES_MAX", 1 << 20)
    receive, discarded = LingeringClose.data_received, list[bytes]()

    def count(lingering: LingeringClose, data: bytes) -> None:
        receive(lingering, data)
        discarded.append(data)

    monkeypatch.setattr(LingeringClose, "data_received", count)
    reader, writer = await server.open(PREFACE + b"no settings, which come first")
    *_, goaway = frames_of(await reader.read())
    assert isinstance(goaway, GoAwayFrame)
    assert goaway.error_code == ErrorCode.FRAME_SIZE_ERROR
    writer.write(bytes(1 << 20))
    await until(lambda: len(b"".join(discarded)) == 1 << 20 or not server.wire.connections)
    (connection,) = server.wire.connections
    assert isinstance(connection, LingeringClose)
    assert not connection._transport.is_closing()
    writer.write(b"x")
    await until(lambda: not server.wire.connections)
    assert b"".join(discarded) == bytes(1 << 20) + b"x"


@pytest.mark.parametrize("protocol", ["HTTP/1.1", "HTTP/2"])
async def test_half_closed_connection_without_reads_is_closed(
    server: OurServer, protocol: str
) -> None:
    """Leaves fewer unread bytes than the transport's limit, so that it does not pause writing."""
    request = post(b'{"features": {"user": [%b[1]]}}' % (b"[1]," * 600))
    if protocol == "HTTP/2":
        request = requesting_client(EXAMPLES // 8).data_to_send()
    _, writer = await server.open(request)
    await until(lambda: server.outcomes().get("OK"))
    writer.write_eof()
    connection: Any
    (connection,) = server.wire.connections
    transport = connection._transport if protocol == "HTTP/2" else connection.transport
    await until(transport.is_closing)
    start_s = perf_counter()
    connection.check_time(start_s)
    connection.check_time(start_s + UNSENT_S_MAX - 1)
    assert server.wire.connections
    connection.check_time(start_s + UNSENT_S_MAX + 1)
    await until(lambda: not server.wire.connections)


class UnreadTransport(asyncio.Transport):
    """A transport whose client has ``unsent_bytes`` still to read."""

    def __init__(self, unsent_bytes: int) -> None:
        super().__init__()
        self.unsent_bytes = unsent_bytes
        self._protocol: asyncio.BaseProtocol

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def write(self, data: Any) -> None: ...

    def writelines(self, list_of_data: Iterable[Any]) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def is_closing(self) -> bool:
        return False

    def write_eof(self) -> None: ...

    def abort(self) -> None:
        self._protocol.connection_lost(None)


def lingering(server: OurServer, transport: UnreadTransport) -> Connection:
    """Returns a connection whose last response is in ``transport``."""
    http1 = server.wire.http1(is_local=False)
    http1.connection_made(transport)
    http1.linger()
    (connection,) = server.wire.connections
    return connection


def full_http2(server: OurServer, transport: UnreadTransport) -> Http2Protocol:
    """Returns an HTTP/2 connection that writes no more until the client has read."""
    connection = server.wire.http2(is_local=False)
    connection.connection_made(transport)
    transport.set_protocol(connection)
    connection.pause_writing()
    return connection


@pytest.mark.parametrize("connect", [lingering, full_http2])
async def test_steadily_read_responses_are_not_cut(
    server: OurServer, connect: Callable[[OurServer, UnreadTransport], Connection]
) -> None:
    """Checks a last response, and a connection that stays full: it counts what the client has read
    meanwhile."""
    transport = UnreadTransport(100 << 20)
    connection, now_s = connect(server, transport), perf_counter()
    for _ in range(5):
        connection.check_time(now_s)
        now_s += UNSENT_S_MAX - 1
        connection.check_time(now_s)
        transport.unsent_bytes -= PROGRESS_BYTES_MIN
        now_s += 2
    assert server.wire.connections
    connection.check_time(now_s)
    transport.unsent_bytes -= PROGRESS_BYTES_MIN - 1
    connection.check_time(now_s + UNSENT_S_MAX)
    assert server.wire.connections
    connection.check_time(now_s + UNSENT_S_MAX + 1)
    assert not server.wire.connections


async def test_streams_without_window_are_not_reset_while_the_server_reads_none(
    server: OurServer,
) -> None:
    """Checks that a full connection, whose window updates are not read, resets no stream for
    them."""
    transport = UnreadTransport(100 << 20)
    connection = full_http2(server, transport)
    connection.data_received(requesting_client(window=1000).data_to_send().removeprefix(PREFACE))
    await until(lambda: connection._connection.frame_writer.unsent_bytes)
    connection._connection.frame_writer.pump()
    (stream,) = connection._connection.frame_writer.blocked_streams.values()
    now_s = perf_counter()
    for _ in range(4):
        connection.check_time(now_s)
        transport.unsent_bytes -= PROGRESS_BYTES_MIN
        now_s += UNSENT_S_MAX / 2
    assert connection._connection.streams == {1: stream}
    connection.resume_writing()
    connection.check_time(now_s + UNSENT_S_MAX)
    assert connection._connection.streams == {}
    transport.abort()


async def test_last_response_counts_completely_until_it_is_read(server: OurServer) -> None:
    """Checks that the whole response counts: uvloop keeps all chunks of a write until the last."""
    body = bytes(1 << 20)
    transport = UnreadTransport(PROGRESS_BYTES_MIN)
    http1 = server.wire.http1(is_local=False)
    http1.connection_made(transport)
    http1.write(b"head", [body], len(body))
    http1.linger()
    (connection,) = server.wire.connections
    assert connection.held_bytes == len(body)
    connection.check_time(perf_counter())
    transport.unsent_bytes = 0
    assert connection.held_bytes == 0


async def test_client_may_close_after_reading_the_last_response(
    server: OurServer,
) -> None:
    transport = UnreadTransport(PROGRESS_BYTES_MIN)
    connection, now_s = lingering(server, transport), perf_counter()
    connection.check_time(now_s + UNSENT_S_MAX)
    transport.unsent_bytes = 0
    connection.check_time(now_s + UNSENT_S_MAX + LINGER_S_MAX)
    assert server.wire.connections
    connection.check_time(now_s + UNSENT_S_MAX + LINGER_S_MAX + 1)
    assert not server.wire.connections


async def expect_failure(server: OurServer, sent: bytes) -> None:
    """Checks that a connection that sends ``sent`` ends, and that the error is reported."""
    loop_errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: loop_errors.append(context))
    reader, _ = await server.open(sent)
    with contextlib.suppress(ConnectionResetError):
        await reader.read()
    await until(lambda: not server.wire.connections)
    assert isinstance(loop_errors[0]["exception"], ZeroDivisionError)


async def test_unexpected_error_in_a_later_iteration_ends_the_connection(
    server: OurServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers the input left for a later iteration of the event loop: the transport does not call
    the connection for it."""
    receive = Http2Connection.receive

    def fail_later(connection: Http2Connection, data: bytes) -> None:
        if not data:
            raise ZeroDivisionError("nobody foresaw this")
        receive(connection, data)

    monkeypatch.setattr(Http2Connection, "receive", fail_later)
    client = H2Connection()
    client.initiate_connection()
    for number in range(100):
        client.ping(b"%08d" % number)
    await expect_failure(server, client.data_to_send())


async def test_unexpected_error_in_held_requests_ends_the_connection(
    server: OurServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers a pipelined request, which is parsed after the response to the one before it."""
    take_held = FastPathConnection.take_held

    def fail(connection: FastPathConnection, data: bytes) -> None:
        raise ZeroDivisionError("nobody foresaw this")

    def take_and_fail(connection: FastPathConnection) -> None:
        monkeypatch.setattr(FastPathConnection, "data_received", fail)
        take_held(connection)

    monkeypatch.setattr(FastPathConnection, "take_held", take_and_fail)
    await expect_failure(server, post(b'{"features": {"user": [[1]]}}') * 2)


async def test_response_that_cannot_be_written_ends_only_its_own_connection(
    server: OurServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers two requests of one batch: the second is answered although the first fails twice, in
    writing its response and then its error."""
    submit, write = RequestPipeline.submit, FastPathConnection.write
    waiting: list[tuple[RequestContext, bytes]] = []
    failing: list[FastPathConnection] = []

    def submit_both(pipeline: RequestPipeline, context: RequestContext, body: bytes) -> None:
        waiting.append((context, body))
        if len(waiting) == 2:
            for one in waiting:
                submit(pipeline, *one)

    def fail_first(connection: FastPathConnection, *args: Any) -> None:
        failing.append(connection)
        if connection is failing[0]:
            raise MemoryError
        write(connection, *args)

    monkeypatch.setattr(RequestPipeline, "submit", submit_both)
    monkeypatch.setattr(FastPathConnection, "write", fail_first)
    opened = [await server.open(post(b'{"features": {"user": [[1]]}}')) for _ in range(2)]
    heads = [asyncio.ensure_future(reader.read(12)) for reader, _ in opened]
    done = await asyncio.wait_for(asyncio.gather(*heads, return_exceptions=True), WAIT_S_MAX)
    assert done.count(b"HTTP/1.1 200") == 1


async def test_tests_run_on_uvloop() -> None:
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
