"""Tests that large input is read in chunks: other connections do not wait longer for it."""

import asyncio
from collections import Counter
from collections.abc import Callable
from time import perf_counter

import pytest
from hyperframe.frame import PingFrame, SettingsFrame
from server.live import PROTOBUF
from server.raw_http import OurServer, chunked, get, post, read_response
from server.waiting import until

from embedserve.config import Limits
from embedserve.wire.connections import Connection, LingeringClose
from embedserve.wire.http1.connection import BODY_PIECES_MAX, Http1Connection
from embedserve.wire.http1.connection import CHUNK_BYTES as HTTP1_CHUNK_BYTES
from embedserve.wire.http1.stream import Http1Stream
from embedserve.wire.http2.connection import Http2Connection
from embedserve.wire.http2.frames import PREFACE
from embedserve.wire.http2.protocol import Http2Protocol
from embedserve.wire.wire_server import CHECK_TURN_S

SENT_BYTES = 16 << 20
ITERATION_BYTES_MAX = 256 << 10
LIMITS = Limits()


class Turns:
    """Counts the bytes that are read in each event-loop iteration from now on."""

    def __init__(self) -> None:
        self.nbytes = Counter[int]()
        self._turn = 0
        self._loop = asyncio.get_running_loop()
        self._begin()

    def _begin(self) -> None:
        self._turn += 1
        self._loop.call_soon(self._begin)

    def count(self, nbytes: int) -> None:
        self.nbytes[self._turn] += nbytes


async def test_large_body_is_read_in_chunks_between_other_connections(
    server: OurServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns()
    monkeypatch.setattr(server.wire, "record_growth", turns.count)
    reader, _ = await server.open(
        post(b"\x08\x01" * (SENT_BYTES // 2), f"Content-Type: {PROTOBUF}")
    )
    status, _, _ = await read_response(reader)
    assert status == 413  # of its cost, which is known once the body is whole
    assert turns.nbytes.total() >= SENT_BYTES
    assert max(turns.nbytes.values()) <= ITERATION_BYTES_MAX


@pytest.mark.parametrize("chunk_bytes", [1, 16, 64 << 10])
async def test_chunked_body_is_read_in_chunks_between_other_connections(
    server: OurServer, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    """Checks the bytes of an iteration, and its calls for each chunk of the body."""
    nbytes, pieces = Turns(), Turns()
    append = Http1Stream.append

    def count(stream: Http1Stream, data: bytes) -> None:
        nbytes.count(len(data))
        pieces.count(1)
        append(stream, data)

    monkeypatch.setattr(Http1Stream, "append", count)
    body = b"\x08\x01" * (min(chunk_bytes * 16 * BODY_PIECES_MAX, SENT_BYTES) // 2)
    chunks = [body[start : start + chunk_bytes] for start in range(0, len(body), chunk_bytes)]
    head = chunked(b"", f"Content-Type: {PROTOBUF}").removesuffix(b"0\r\n\r\n")
    reader, writer = await server.open(head)
    writer.writelines([b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks])
    writer.write(b"0\r\n\r\n")
    await read_response(reader)
    assert nbytes.nbytes.total() == len(body)
    assert max(nbytes.nbytes.values()) <= ITERATION_BYTES_MAX
    # An iteration may have a read beside the rest of an earlier one.
    assert max(pieces.nbytes.values()) <= 2 * (BODY_PIECES_MAX + HTTP1_CHUNK_BYTES // 6)


async def test_immediately_rejected_requests_are_processed_in_portions(
    server: OurServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that no response is lost, and that the other responses come in order."""
    turns = Turns()
    response_sent = Http1Connection.response_sent

    def count(connection: Http1Connection, stream: Http1Stream) -> None:
        turns.count(1)
        response_sent(connection, stream)

    monkeypatch.setattr(Http1Connection, "response_sent", count)
    rejected_request = b"GET /embed HTTP/1.1\r\nHost:a\r\n\r\n"
    number = 8 * HTTP1_CHUNK_BYTES // len(rejected_request)
    reader, _ = await server.open(
        rejected_request * number + get("/health/live", "Connection: close")
    )
    statuses = [(await read_response(reader))[0] for _ in range(number + 1)]
    assert statuses == [405] * number + [200]
    assert await reader.read() == b""
    assert turns.nbytes.total() == number + 1
    assert max(turns.nbytes.values()) <= 1 + HTTP1_CHUNK_BYTES // len(rejected_request)


async def test_discarded_input_is_processed_in_portions(
    server: OurServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the input of a lingering connection, whose last response is written."""
    turns = Turns()
    receive = LingeringClose.data_received

    def data_received(lingering: LingeringClose, data: bytes) -> None:
        turns.count(len(data))
        receive(lingering, data)

    monkeypatch.setattr(LingeringClose, "data_received", data_received)
    reader, writer = await server.open(PREFACE + b"no settings, which come first")
    await reader.read()
    writer.write(bytes(SENT_BYTES))
    await until(lambda: turns.nbytes.total() >= SENT_BYTES)
    assert max(turns.nbytes.values()) <= ITERATION_BYTES_MAX


async def test_connection_that_fills_and_drains_has_one_turn_per_iteration(
    server: OurServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks a connection with frames left to read whose output is taken at once."""
    turns = Turns()
    receive = Http2Connection.receive

    def count(connection: Http2Connection, data: bytes) -> None:
        turns.count(1)
        receive(connection, data)

    monkeypatch.setattr(Http2Connection, "receive", count)
    reader, _ = await server.open(
        PREFACE + SettingsFrame(0).serialize() + PingFrame(0, b"12345678").serialize()
    )
    await reader.readexactly(1)
    (connection,) = server.wire.connections
    assert isinstance(connection, Http2Protocol)
    connection.data_received(PingFrame(0, b"12345678").serialize() * 500)
    while connection._connection.has_more:
        for _ in range(3):
            connection.pause_writing()
            connection.resume_writing()
        await asyncio.sleep(0)
    assert turns.nbytes.total() > 10
    assert max(turns.nbytes.values()) <= 2  # that of the frames, and the first of the rest


class CheckedConnection(Connection):
    """A connection whose check of its time limits takes half of an iteration's time."""

    held_bytes = 0

    def __init__(self, on_check: Callable[[], None]) -> None:
        self._on_check = on_check

    def check_time(self, now_s: float) -> None:
        end_s = perf_counter() + CHECK_TURN_S / 2
        while perf_counter() < end_s:
            pass
        self._on_check()


async def test_time_limits_of_many_connections_are_checked_in_portions(server: OurServer) -> None:
    turns = Turns()
    errors: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))

    def count() -> None:
        turns.count(1)
        if turns.nbytes.total() == 5:
            raise RuntimeError("of one connection")

    connections = [CheckedConnection(count) for _ in range(20)]
    for connection in connections:
        server.wire.add(connection)
    assert server.wire._checking is not None
    server.wire._checking.cancel()
    server.wire._check()
    await until(lambda: turns.nbytes.total() == len(connections))
    assert max(turns.nbytes.values()) <= 2
    assert len(errors) == 1  # and the other connections are checked
    for connection in connections:
        server.wire.discard(connection)
