"""Tests of streams: too many, half requests, resets, and a thousand idle streams."""

import socket
import struct
import time

import numpy as np
import pytest
from hostile import frames as f
from hostile.canary_client import embed_request, embedded
from hostile.conftest import MakePeer
from hostile.frames import CANCEL, ENHANCE_YOUR_CALM, REFUSED_STREAM
from hostile.peer import WIDE, WIDER, Peer
from hostile.target_server import LIMITS

from embedserve.wire.http2.inbound_flow_control import STREAM_WINDOW
from embedserve_proto import embedding_pb2 as pb

STREAMS_MAX = 128
OPEN_POST = f.head(b"POST", b"/embed", (b"content-type", b"application/json"))
STREAM_HEADERS = f.grpc_head(b"EmbedStream")


def incomplete_requests(first: int, count: int, block: bytes) -> bytes:
    """Returns the headers of requests whose bodies never arrive."""
    return b"".join(f.headers(first + 2 * i, block, end=False) for i in range(count))


def test_streams_over_the_limit_are_rejected(rest_peer: MakePeer) -> None:
    """Checks also that as soon as an open stream ends, the next is accepted."""
    peer = rest_peer()
    peer.send(incomplete_requests(1, STREAMS_MAX + 5, OPEN_POST))
    rejected = [2 * i + 1 for i in range(STREAMS_MAX, STREAMS_MAX + 5)]
    assert [peer.response(stream).reset_code for stream in rejected] == [REFUSED_STREAM] * 5
    assert set(peer.responses) == set(rejected)
    peer.send(f.data(1, b'{"features": {"user": [1]}}'))
    assert peer.response(1).status == 200
    last = rejected[-1] + 2
    peer.send(f.get(last))
    assert peer.response(last).status == 200


def test_flood_of_streams_over_the_limit_is_rejected(rest_peer: MakePeer) -> None:
    """Opens 20,000 streams: each is rejected, or the connection ends; the server stores none."""
    peer = rest_peer()
    peer.send(incomplete_requests(1, 20_000, OPEN_POST))
    last = 2 * 20_000 - 1
    peer.read_until(lambda: peer.goaway_code is not None or last in peer.responses, "answer")
    if peer.goaway_code is None:
        assert peer.response(last).reset_code == REFUSED_STREAM
    else:
        assert peer.ending() == ENHANCE_YOUR_CALM


def test_header_tables_agree_after_a_rejected_stream(rest_peer: MakePeer) -> None:
    """Checks that the server decodes a rejected stream's block nevertheless: the tables of both
    ends must agree.
    """
    peer = rest_peer()
    peer.send(incomplete_requests(1, STREAMS_MAX, OPEN_POST))
    entry = f.literal(b":path", b"/health/live", 0x40)
    start = f.block([(b":method", b"GET"), (b":scheme", b"http"), (b":authority", b"test")])
    rejected, after = 2 * STREAMS_MAX + 1, 2 * STREAMS_MAX + 3
    peer.send(f.headers(rejected, start + entry))
    assert peer.response(rejected).reset_code == REFUSED_STREAM
    peer.send(f.rst_stream(1) + f.headers(after, start + f.integer(62, 7, 0x80)))
    assert peer.response(after).status == 200


def test_header_tables_agree_after_a_reset_stream(rest_peer: MakePeer) -> None:
    """Checks that the server decodes HEADERS for a reset stream: trailers may cross the reset."""
    peer = rest_peer()
    entry = f.literal(b":path", b"/health/live", 0x40)
    start = f.block([(b":method", b"GET"), (b":scheme", b"http"), (b":authority", b"test")])
    malformed = f.headers(1, f.block([(b":method", b"GET")]) + entry, end=False)
    peer.send(malformed + f.headers(3, start + f.integer(62, 7, 0x80)))
    assert peer.response(3).status == 200


def test_incomplete_bodies_on_every_stream_do_no_harm(
    rest_peer: MakePeer, grpc_peer: MakePeer
) -> None:
    """Fills a connection with half requests, on both ports; the server still serves others."""
    for peer, block in ((rest_peer(), OPEN_POST), (grpc_peer(), f.grpc_head(b"Embed"))):
        numbers = range(1, 2 * STREAMS_MAX, 2)
        peer.send(incomplete_requests(1, STREAMS_MAX, block))
        peer.send(b"".join(f.data(stream, b"\0\0\0", end=False) for stream in numbers))
        peer.pong()
        assert peer.responses == {}


@pytest.mark.growth(64 << 10)
def test_bodies_that_stop_within_the_window_hold_bounded_memory(rest_peer: MakePeer) -> None:
    """Sends 128 bodies in part, without their end: the connection has a window."""
    peer = rest_peer()
    numbers = range(1, 2 * STREAMS_MAX, 2)
    peer.send(incomplete_requests(1, STREAMS_MAX, OPEN_POST))
    for stream in numbers:
        peer.send(f.data(stream, bytes(8_000), end=False))
    peer.pong()
    assert peer.goaway_code is None


def test_body_beyond_the_stream_window_is_rejected(rest_peer: MakePeer) -> None:
    """Sends a body past the stream's window, without waiting for WINDOW_UPDATE."""
    peer = rest_peer()
    peer.send(incomplete_requests(1, 4, OPEN_POST))
    sent = b"".join(f.data(stream, bytes(1 << 20), end=False) for stream in range(1, 9, 2))
    peer.send(sent * 2)

    def is_rejected() -> bool:
        ended = {response.reset_code for response in peer.responses.values()} | {peer.goaway_code}
        statuses = {a.headers[":status"] for a in peer.responses.values() if a.headers}
        return f.FLOW_CONTROL_ERROR in ended or statuses == {"413"}

    peer.read_until(is_rejected, "rejection")
    assert is_rejected()


def test_thousand_idle_streams_do_not_block_other_calls(
    grpc_peer: MakePeer, rows: np.ndarray
) -> None:
    """Opens 1,000 EmbedStreams over 8 connections; each gets one response and is then idle."""
    message = f.message(embed_request([7]))
    connections: list[Peer] = []
    for _ in range(8):
        peer = grpc_peer()
        numbers = range(1, 251, 2)
        peer.send(b"".join(f.headers(n, STREAM_HEADERS, end=False) for n in numbers))
        peer.send(b"".join(f.data(n, message, end=False) for n in numbers))
        for n in numbers:
            body = peer.body_of(n, 5 + 4 * rows.shape[1])
            values = np.frombuffer(pb.EmbedResponse.FromString(body[5:]).values, "<f4")
            np.testing.assert_array_equal(values, rows[7])
        connections.append(peer)
    end = time.monotonic() + 1.0
    number = 251
    while time.monotonic() < end:
        peer = connections[number % 8]
        peer.send(f.get(number) + f.call(number + 2, embed_request([9])))
        assert peer.response(number).status == 200
        np.testing.assert_array_equal(embedded(peer, number + 2), rows[[9]])
        number += 4
    for peer in connections:
        assert not any(response.is_whole for n, response in peer.responses.items() if n < 251)
        peer.send(f.data(1))
        assert peer.response(1).grpc_status == 0


def test_unread_body_does_not_cause_a_second_response(rest_peer: MakePeer) -> None:
    """Sends an unread body past every limit, while the response waits for window."""
    peer = rest_peer(greeting=f.PREFACE + f.settings((f.INITIAL_WINDOW_SIZE, 0)))
    peer.send(f.headers(1, f.head(b"GET", b"/health/live"), end=False))
    peer.read_for(0.2)
    for _ in range(10):
        peer.send(f.data(1, bytes(16_000), end=False))
    peer.pong()
    peer.send(f.window_update(1, 1000))
    response = peer.response(1)
    assert response.reset_code is not None or response.status in (200, 413)
    assert response.trailers == {}


def test_response_is_sent_after_earlier_responses_waited_for_window(
    grpc_peer: MakePeer, rows: np.ndarray
) -> None:
    """Checks that later responses do not wait for more input, though earlier responses have
    waited for window while the server read.
    """
    peer = grpc_peer(greeting=f.PREFACE + f.settings((f.INITIAL_WINDOW_SIZE, 0)))
    peer.send(f.headers(1, STREAM_HEADERS, end=False))
    for _ in range(3):
        peer.send(f.data(1, f.message(b"\xff"), end=False))
        peer.pong()
    peer.send(f.settings((f.INITIAL_WINDOW_SIZE, 10_000)))
    for stream in range(3, 43, 2):
        peer.send(f.call(stream, embed_request([8])))
        np.testing.assert_array_equal(embedded(peer, stream), rows[[8]])


def test_response_is_sent_while_other_streams_have_no_window(
    grpc_peer: MakePeer, rows: np.ndarray
) -> None:
    peer = grpc_peer(greeting=f.PREFACE + f.settings((f.INITIAL_WINDOW_SIZE, 0)))
    peer.send(f.headers(1, STREAM_HEADERS, end=False))
    peer.send(f.data(1, f.message(b"\xff"), end=False))
    peer.pong()
    peer.send(f.data(1, f.message(b"\xff"), end=False))
    peer.read_for(0.1)
    incomplete_requests = f.headers(3, f.grpc_head(b"Embed"), end=False) + f.window_update(
        3, 10_000
    )
    peer.send(incomplete_requests + f.data(3, f.message(embed_request([8]))))
    assert peer.read_some(), "no answer, with nothing more sent"
    np.testing.assert_array_equal(embedded(peer, 3), rows[[8]])


def window_increments(peer: Peer, stream: int) -> int:
    """Returns the window received for ``stream``, also during sends; counts each update once."""
    updates = [one for one in peer.of_type(f.WINDOW_UPDATE) if one.stream == stream]
    peer.others.clear()
    return sum(int.from_bytes(one.payload, "big") for one in updates)


def test_promised_large_messages_leave_window_for_other_streams(
    grpc_peer: MakePeer, rows: np.ndarray
) -> None:
    """Opens streams that promise large messages and send one byte each: another stream's message
    still gets window.
    """
    promised = (LIMITS.body_bytes_max).to_bytes(4, "big")
    for _ in range(4):
        peer = grpc_peer()
        peer.send(incomplete_requests(1, STREAMS_MAX, STREAM_HEADERS))
        peer.send(
            b"".join(
                f.data(stream, b"\0" + promised + b"x", end=False)
                for stream in range(1, 2 * STREAMS_MAX, 2)
            )
        )
        peer.pong()
    ids = np.arange(40_000) % 500
    request = f.message(embed_request(ids))
    peer = grpc_peer()
    peer.send(f.headers(1, f.grpc_head(b"Embed"), end=False))
    window, sent = STREAM_WINDOW, 0
    while sent < len(request):
        chunk = request[sent : sent + window]
        peer.send(f.data(1, chunk, end=sent + len(chunk) == len(request)))
        sent += len(chunk)
        while sent < len(request) and not (window := window_increments(peer, 1)):
            assert peer.read_some(), "no more window for a message of 480 KB"
    np.testing.assert_array_equal(embedded(peer, 1), rows[ids])


def test_no_more_bytes_arrive_on_a_reset_stream(grpc_peer: MakePeer) -> None:
    """Checks that after a reset only bytes that were already sent arrive on the stream."""
    peer = grpc_peer()
    for stream in range(1, 401, 2):
        peer.send(f.call(stream, embed_request([1])) + f.rst_stream(stream, CANCEL))
    peer.pong(1)
    before = {stream: len(response.body) for stream, response in peer.responses.items()}
    peer.read_for(0.3)
    assert {stream: len(response.body) for stream, response in peer.responses.items()} == before


def test_connections_reset_by_clients_do_no_harm(rest_peer: MakePeer) -> None:
    """Resets connections while the server makes their responses; other connections get theirs."""
    requests = b"".join(f.get(stream) for stream in range(1, 41, 2))
    linger = struct.pack("ii", 1, 0)
    for number in range(300):
        peer = rest_peer(greeting=f.PREFACE + WIDE + WIDER + requests, acknowledges=False)
        peer.read_for(number % 20 * 0.0005)
        peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        peer.close()


def test_connections_closed_before_their_responses_do_no_harm(rest_peer: MakePeer) -> None:
    """Opens a connection, sends requests and closes it before the responses, 500 times."""
    for _ in range(500):
        peer = rest_peer(
            greeting=f.PREFACE + f.settings() + f.get(1) + f.get(3), acknowledges=False
        )
        peer.close()
