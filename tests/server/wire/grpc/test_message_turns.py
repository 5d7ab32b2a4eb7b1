"""Tests that a connection takes few of very many messages in each event-loop iteration."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from hyperframe.frame import WindowUpdateFrame
from server.fake_engine import FakeEngine
from server.live import make_pipeline
from server.pipelines import outcomes_of
from server.wire.grpc.grpc_peer import NO_HEADERS, STREAM, request_headers
from server.wire.http2.peer import Peer, body_of, data, has_ended, of

from embedserve.wire.grpc.calls import BidiCall
from embedserve.wire.grpc.grpc_framing import MESSAGE_WORK, framed
from embedserve.wire.grpc.service import GrpcService
from embedserve.wire.http2.frames import FRAME_BYTES_MAX
from embedserve.wire.http2.inbound_flow_control import CONNECTION_WINDOW, STREAM_WINDOW
from embedserve.wire.http2.request_headers import ResolvedRoute, read_request
from embedserve.wire.http2.stream import Stream
from embedserve.wire.http2.turns import WORK_PER_TURN
from embedserve.wire.http2.upload_budget import UploadBudget
from embedserve.wire.http_stream import Headers

PER_TURN = WORK_PER_TURN // MESSAGE_WORK
EMPTY = framed(b"")
FULL = EMPTY * (FRAME_BYTES_MAX // len(EMPTY))
"""The payload of one frame."""


class CountingCall(BidiCall):
    """Counts its messages, and echoes each if it ``echoes``."""

    def __init__(self, stream: Stream, *, echoes: bool = True) -> None:
        super().__init__(NO_HEADERS, stream)
        self.received = 0
        self.echoes = echoes

    def take(self, message: bytes) -> None:
        self.received += 1
        if self.echoes:
            self.write((message,), len(message))


class CountingPeer(Peer):
    def __init__(self, *, echoes: bool = True) -> None:
        self.calls: dict[int, CountingCall] = {}
        self.echoes = echoes
        super().__init__(self._open_call, UploadBudget(0, lambda: False))

    def _open_call(self, headers: Headers) -> ResolvedRoute:
        def open_call(stream: Stream) -> CountingCall:
            self.calls[stream.id] = CountingCall(stream, echoes=self.echoes)
            return self.calls[stream.id]

        return ResolvedRoute(open_call, None)

    @property
    def received(self) -> int:
        return sum(call.received for call in self.calls.values())


def call_bytes(peer: Peer, stream_id: int, payload: bytes, *, is_end: bool = False) -> bytes:
    """Returns the bytes of a call whose messages arrive in one frame."""
    frames = (
        peer.headers(stream_id, request_headers(STREAM), is_end=False),
        data(stream_id, payload, is_end=is_end),
    )
    return b"".join(frame.serialize() for frame in frames)


async def test_messages_of_one_frame_are_processed_over_many_iterations() -> None:
    peer = CountingPeer()
    peer.connection.receive(call_bytes(peer, 1, FULL, is_end=True))
    count = len(FULL) // len(EMPTY)
    assert peer.received == PER_TURN < count // 20
    while peer.received < count:
        before = peer.received
        await asyncio.sleep(0)
        assert peer.received == min(count, before + PER_TURN)
    assert has_ended(peer.take(), 1)
    assert body_of(peer.seen, 1) == FULL  # in order, and none lost


async def test_streams_share_the_messages_per_iteration_of_a_connection() -> None:
    peer = CountingPeer()
    numbers = range(1, 15, 2)
    peer.connection.receive(b"".join(call_bytes(peer, number, FULL) for number in numbers))
    assert peer.received == PER_TURN
    assert peer.connection.left_bytes
    while peer.connection.has_more:
        peer.connection.receive(b"")
    assert peer.received == PER_TURN * len(numbers)
    for turn in range(1, 3 * len(numbers)):
        await asyncio.sleep(0)
        assert peer.received == PER_TURN * (len(numbers) + turn)
    most = max(call.received for call in peer.calls.values())
    assert most - min(call.received for call in peer.calls.values()) <= PER_TURN


async def test_windows_reopen_as_messages_are_processed() -> None:
    """Checks windows for messages without a response, such as those to a health watch."""
    peer = CountingPeer(echoes=False)
    flow_control = peer.connection.flow_control
    for number in range(1, 2 * CONNECTION_WINDOW // STREAM_WINDOW, 2):
        sent = [data(number, FULL) for _ in range(STREAM_WINDOW // FRAME_BYTES_MAX)]
        peer.send(peer.headers(number, request_headers(STREAM), is_end=False), *sent)
    count = len(peer.calls) * (STREAM_WINDOW // FRAME_BYTES_MAX) * (len(FULL) // len(EMPTY))
    assert peer.received < count // 2
    assert flow_control.window < STREAM_WINDOW
    peer.outputs = 0
    while peer.received < count:
        before = peer.received
        await asyncio.sleep(0)
        assert before < peer.received <= before + PER_TURN
    assert peer.outputs
    updates = of(peer.take(), WindowUpdateFrame)
    assert {one.stream_id for one in updates} == {0, *peer.calls}
    assert flow_control.held_bytes == 0


@pytest.mark.parametrize("ends", ["reset", "closed"])
async def test_pending_messages_are_dropped_when_the_stream_ends(ends: str) -> None:
    peer = CountingPeer()
    peer.connection.receive(call_bytes(peer, 1, FULL))
    call = peer.calls[1]
    if ends == "reset":
        peer.connection.reset(1, "streams")
    else:
        peer.connection.close()
    assert call.is_read is False
    assert call._deframer.nbytes == 0
    await asyncio.sleep(0)
    assert call.received == PER_TURN
    assert peer.connection.flow_control.held_bytes == 0


async def test_invalid_requests_of_a_stream_are_rejected_over_many_iterations(
    engine: FakeEngine, executor: ThreadPoolExecutor
) -> None:
    pipeline = make_pipeline(engine, executor=executor)
    service = GrpcService(pipeline)

    def resolve(headers: Headers) -> ResolvedRoute:
        request = read_request(headers)
        assert not isinstance(request, str)
        return ResolvedRoute(service.resolve(request), None)

    peer = Peer(resolve)
    invalid = framed(b"\xff") * 500
    peer.connection.receive(call_bytes(peer, 1, invalid, is_end=True))

    def response_count() -> int:
        return outcomes_of(pipeline.metrics.protocols["grpc"])["INVALID_ARGUMENT"]

    assert response_count() == PER_TURN
    while (before := response_count()) < 500:
        await asyncio.sleep(0)
        assert before < response_count() <= before + PER_TURN
    assert has_ended(peer.take(), 1)
