"""Tests of readers that open no window, or one byte of it: the server waits at little cost."""

import json

import numpy as np
import pytest
from hostile import frames as f
from hostile.canary_client import embed_request
from hostile.conftest import MakePeer
from hostile.frames import INITIAL_WINDOW_SIZE
from hostile.peer import Peer

from embedserve_proto import embedding_pb2 as pb

EXAMPLES = 4096
ANSWER_BYTES = EXAMPLES * 64 * 4
"""Bytes of a large response's values: 1 MiB."""
STREAMS_MAX = 128
LARGE_CALL = embed_request(np.arange(EXAMPLES) % 500)


def greeting(window: int) -> bytes:
    return f.PREFACE + f.settings((INITIAL_WINDOW_SIZE, window))


def check_large(body: bytes, rows: np.ndarray) -> None:
    values = np.frombuffer(pb.EmbedResponse.FromString(body[5:]).values, "<f4")
    np.testing.assert_array_equal(values.reshape(EXAMPLES, -1), rows[np.arange(EXAMPLES) % 500])


def test_response_without_window_waits_while_other_streams_are_answered(
    grpc_peer: MakePeer,
) -> None:
    """Checks that a response's body waits for window; other streams get their responses."""
    peer = grpc_peer(greeting=greeting(0) + f.window_update(0, 1 << 20))
    peer.send(f.call(1, LARGE_CALL))
    peer.pong()
    peer.send(f.get(3))
    peer.send(f.window_update(3, 1000))
    assert peer.response(3).status == 200
    peer.read_for(0.3)
    assert peer.responses.get(1) is None or peer.responses[1].body == b""


@pytest.mark.growth(200 << 10)
def test_large_responses_without_window_hold_bounded_memory(grpc_peer: MakePeer) -> None:
    """Requests 128 responses of 1 MiB without reading: at most 64 MiB wait, others are rejected."""
    peer = grpc_peer(greeting=greeting(0))
    for stream in range(1, 2 * STREAMS_MAX, 2):
        peer.send(f.call(stream, LARGE_CALL))
    peer.pong()
    peer.read_for(1.0)
    assert all(response.body == b"" for response in peer.responses.values())
    assert {response.reset_code for response in peer.responses.values()} <= {None, f.REFUSED_STREAM}


@pytest.mark.parametrize("streams", [1, STREAMS_MAX])
def test_server_sends_exactly_the_bytes_that_the_window_allows(
    streams: int, grpc_peer: MakePeer
) -> None:
    """Checks that the server sends exactly what the window allows, byte for byte."""
    peer = grpc_peer(greeting=greeting(1))
    numbers = range(1, 2 * streams, 2)
    request = embed_request([3])
    peer.send(b"".join(f.call(stream, request) for stream in numbers))
    for granted in range(1, 9):
        for stream in numbers:
            assert len(peer.body_of(stream, granted)) == granted
        peer.pong(granted)
        assert {len(peer.responses[stream].body) for stream in numbers} == {granted}
        peer.send(b"".join(f.window_update(stream, 1) for stream in numbers))
    peer.send(b"".join(f.window_update(stream, 60_000) for stream in numbers))
    peer.send(f.window_update(0, 1 << 20))
    bodies = {peer.response(stream).body for stream in numbers}
    (body,) = bodies
    assert pb.EmbedResponse.FromString(body[5:]).batch_size == 1


def test_responses_stop_at_the_connection_window(grpc_peer: MakePeer, rows: np.ndarray) -> None:
    """Checks that only the connection's 65,535 bytes of window arrive; the streams have more."""
    peer = grpc_peer(greeting=greeting(f.WINDOW_MAX))

    def received() -> int:
        return sum(len(response.body) for response in peer.responses.values())

    peer.send(f.call(1, LARGE_CALL) + f.call(3, LARGE_CALL))
    peer.read_until(lambda: received() >= 65_535, "what the window allows")
    peer.read_for(0.3)
    assert received() == 65_535
    peer.send(f.window_update(0, 1))
    peer.read_until(lambda: received() > 65_535, "byte")
    peer.read_for(0.2)
    assert received() == 65_536
    peer.send(f.window_update(0, 4 << 20))
    for stream in (1, 3):
        check_large(peer.response(stream).body, rows)


def test_stream_with_a_negative_window_sends_nothing(grpc_peer: MakePeer, rows: np.ndarray) -> None:
    """Checks RFC 9113, 6.9.2: a smaller initial window may make a stream's window negative."""
    peer = grpc_peer(greeting=greeting(40_000) + f.window_update(0, 4 << 20))
    peer.send(f.call(1, LARGE_CALL))
    assert len(peer.body_of(1, 40_000)) == 40_000
    peer.send(f.settings((INITIAL_WINDOW_SIZE, 10_000)))
    peer.pong(1)
    peer.send(f.window_update(1, 29_999))
    peer.pong(2)
    peer.read_for(0.2)
    assert len(peer.responses[1].body) == 40_000
    peer.send(f.window_update(1, 2))
    assert len(peer.body_of(1, 40_001)) == 40_001
    peer.send(f.settings((INITIAL_WINDOW_SIZE, 10_005)))
    assert len(peer.body_of(1, 40_006)) == 40_006
    peer.send(f.settings((INITIAL_WINDOW_SIZE, 0)) + f.settings((INITIAL_WINDOW_SIZE, 10_006)))
    assert len(peer.body_of(1, 40_007)) == 40_007
    peer.pong(3)
    assert len(peer.responses[1].body) == 40_007
    peer.send(f.settings((INITIAL_WINDOW_SIZE, f.WINDOW_MAX - 100_000)))
    check_large(peer.response(1).body, rows)


def test_stream_with_a_negative_window_waits_when_the_connection_opens(
    grpc_peer: MakePeer, rows: np.ndarray
) -> None:
    """Makes a stream's window negative while it waits for the connection's window. The server once
    tried to send on it without end, and took hundreds of megabytes a second.
    """
    peer = grpc_peer(greeting=greeting(1 << 20))
    peer.send(f.call(1, LARGE_CALL))
    assert len(peer.body_of(1, 65_535)) == 65_535
    peer.send(f.settings((INITIAL_WINDOW_SIZE, 0)) + f.window_update(0, 4 << 20))
    peer.pong(1)
    assert len(peer.responses[1].body) == 65_535
    peer.send(f.get(3) + f.window_update(3, 1000))
    assert peer.response(3).status == 200
    peer.send(f.settings((INITIAL_WINDOW_SIZE, f.WINDOW_MAX - (2 << 20))))
    check_large(peer.response(1).body, rows)


def test_max_frame_size_may_change_during_a_response(grpc_peer: MakePeer, rows: np.ndarray) -> None:
    peer = grpc_peer(greeting=greeting(1 << 16) + f.window_update(0, 4 << 20))
    peer.send(f.call(1, LARGE_CALL))
    peer.body_of(1, 1 << 16)
    peer.send(f.settings((f.MAX_FRAME_SIZE, 1 << 20)) + f.window_update(1, 1 << 17))
    peer.body_of(1, 3 << 16)
    peer.send(f.settings((f.MAX_FRAME_SIZE, 1 << 14)) + f.window_update(1, 1 << 20))
    check_large(peer.response(1).body, rows)


@pytest.mark.growth(200 << 10)
def test_large_unread_responses_hold_bounded_memory(grpc_peer: MakePeer) -> None:
    """Opens all windows, and reads no byte from the socket."""
    peer = grpc_peer(receive_buffer=4096)
    for stream in range(1, 2 * STREAMS_MAX, 2):
        sent = f.call(stream, LARGE_CALL)
        if peer.send(sent, reads=False, wait_s=0.3) < len(sent):
            break
    peer.read_for(0.0)


def slow_readers(make: MakePeer, count: int) -> list[Peer]:
    opened = [make(greeting=greeting(0)) for _ in range(count)]
    for peer in opened:
        peer.send(f.call(1, LARGE_CALL))
    return opened


@pytest.mark.growth(96 << 10)
def test_many_connections_without_window_hold_bounded_memory(grpc_peer: MakePeer) -> None:
    """Opens 40 connections with a response of 1 MiB each; their memory is freed when they close."""
    for peer in slow_readers(grpc_peer, 40):
        peer.pong()


@pytest.mark.growth(96 << 10)
def test_unsent_responses_are_freed_with_their_connections(grpc_peer: MakePeer) -> None:
    """Leaves 200 MiB of responses unread, 20 connections at a time."""
    for _ in range(10):
        opened = slow_readers(grpc_peer, 20)
        for peer in opened:
            peer.pong()
            peer.close()


@pytest.mark.growth(96 << 10)
def test_unsent_responses_are_freed_with_their_streams(grpc_peer: MakePeer) -> None:
    """Requests 200 responses of 1 MiB on one connection, and resets each before it is read."""
    peer = grpc_peer(greeting=greeting(0))
    for stream in range(1, 401, 2):
        peer.send(f.call(stream, LARGE_CALL))
        peer.pong()
        peer.send(f.rst_stream(stream))
    peer.send(f.get(401) + f.window_update(401, 1000))
    assert peer.response(401).status == 200


def test_rest_response_waits_for_window(rest_peer: MakePeer, rows: np.ndarray) -> None:
    """Reads JSON of 4,000 rows with 100,000 bytes of window at a time."""
    peer = rest_peer(greeting=greeting(0) + f.window_update(0, 64 << 20))
    ids = [[i % 500] for i in range(4000)]
    body = json.dumps({"features": {"user": ids}}).encode()
    json_type = (b"content-type", b"application/json")
    peer.send(f.headers(1, f.head(b"POST", b"/embed", json_type), end=False) + f.data(1, body))
    granted = 0
    while not (found := peer.responses.get(1)) or not found.is_whole:
        if found is None or len(found.body) == granted:
            granted += 100_000
            peer.send(f.window_update(1, 100_000))
        peer.read_for(0.01)
        if (found := peer.responses.get(1)) is not None:
            assert len(found.body) <= granted
    assert found.status == 200
    values = np.array(json.loads(found.body)["values"], np.float32)
    np.testing.assert_array_equal(values, rows[np.array(ids)[:, 0]])
