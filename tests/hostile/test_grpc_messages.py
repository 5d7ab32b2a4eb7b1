"""Tests of gRPC on valid HTTP/2: invalid prefixes, compression, counts, deadlines and metadata."""

import gzip
import struct
import zlib
from urllib.parse import unquote_to_bytes

import numpy as np
import pytest
from grpc_messages import unframed
from hostile import frames as f
from hostile.canary_client import embed_request, embedded
from hostile.conftest import MakePeer
from hostile.peer import Peer, Response
from hostile.target_server import LIMITS

from embedserve.wire.http2.inbound_flow_control import STREAM_WINDOW
from embedserve_proto import embedding_pb2 as pb

BODY_BYTES_MAX = LIMITS.body_bytes_max
CANCELLED, UNKNOWN, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND = range(1, 6)
RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 8, 12, 13, 14
REQUEST = embed_request([5])
LARGE_CALL = embed_request([0] * 4096)
BODY_GZIP = (b"grpc-encoding", b"gzip")
BODY_DEFLATE = (b"grpc-encoding", b"deflate")


def send_call(
    peer: Peer, stream: int, body: bytes, *more: f.Header, method: bytes = b"Embed"
) -> Response:
    """Sends a unary call with this body, and returns its response."""
    peer.send(f.headers(stream, f.grpc_head(method, *more), end=False) + f.data(stream, body))
    return peer.response(stream)


def check_rejected(response: Response, *codes: int) -> None:
    """Checks a gRPC rejection: HTTP status 200, one of these codes, no message, no reset."""
    assert response.reset_code is None
    assert response.status == 200
    assert response.grpc_status in codes, response.grpc_message
    assert response.body == b""


def check_usable(peer: Peer, stream: int, rows: np.ndarray) -> None:
    peer.send(f.call(stream, REQUEST))
    np.testing.assert_array_equal(embedded(peer, stream), rows[[5]])
    assert peer.goaway_code is None


def prefix(length: int) -> bytes:
    return struct.pack(">?L", False, length)


BOMB = gzip.compress(bytes(16 << 20), mtime=0)
"""A compressed message of 16 KB that decompresses to 16 MiB."""
ZEROS = gzip.compress(bytes(BODY_BYTES_MAX + 1), mtime=0)
INVALID_MESSAGES = {
    "2^32-1 bytes promised": (prefix(2**32 - 1) + b"x", (), {RESOURCE_EXHAUSTED}),
    "a byte too many promised": (prefix(BODY_BYTES_MAX + 1), (), {RESOURCE_EXHAUSTED}),
    "a byte too many": (f.message(bytes(BODY_BYTES_MAX + 1)), (), {RESOURCE_EXHAUSTED}),
    "a bomb": (f.message(BOMB, True), (BODY_GZIP,), {RESOURCE_EXHAUSTED}),
    "a deflated bomb": (
        f.message(zlib.compress(bytes(16 << 20)), True),
        (BODY_DEFLATE,),
        {RESOURCE_EXHAUSTED},
    ),
    "a byte too many, inflated": (f.message(ZEROS, True), (BODY_GZIP,), {RESOURCE_EXHAUSTED}),
    "protobuf of many small fields": (f.message(b"\x08\x00" * 400_000), (), {RESOURCE_EXHAUSTED}),
    "nested groups": (f.message(b"\x63" * 100_000), (), {INVALID_ARGUMENT}),
}


@pytest.mark.parametrize("name", INVALID_MESSAGES)
@pytest.mark.growth(40 << 10)
def test_invalid_message_is_rejected_and_the_connection_stays_usable(
    name: str, grpc_peer: MakePeer, rows: np.ndarray
) -> None:
    body, more, codes = INVALID_MESSAGES[name]
    peer = grpc_peer()
    check_rejected(send_call(peer, 1, body, *more), *codes)
    check_usable(peer, 3, rows)


def test_concurrent_decompression_bombs_hold_no_memory(grpc_peer: MakePeer) -> None:
    """Sends 20 bombs concurrently, 320 MiB in all if the server decompressed them."""
    peer = grpc_peer()
    opened = f.grpc_head(b"Embed", BODY_GZIP)
    peer.send(b"".join(f.headers(stream, opened, end=False) for stream in range(1, 41, 2)))
    bomb = f.message(BOMB, True)
    for stream in range(1, 41, 2):
        peer.send(f.data(stream, bomb))
        assert peer.response(stream).grpc_status == RESOURCE_EXHAUSTED


@pytest.mark.parametrize("nbytes", [1, 2, 7])
def test_message_in_many_small_frames_is_answered(
    nbytes: int, grpc_peer: MakePeer, rows: np.ndarray
) -> None:
    """Checks the response to a call of 4,000 bytes in frames of ``nbytes``."""
    ids = [i % 500 for i in range(330)]
    body = f.message(embed_request(ids))
    peer = grpc_peer()
    peer.send(f.headers(1, f.grpc_head(b"Embed"), end=False))
    chunks = [body[i : i + nbytes] for i in range(0, len(body), nbytes)]
    peer.send(b"".join(f.data(1, chunk, end=False) for chunk in chunks) + f.data(1))
    np.testing.assert_array_equal(embedded(peer, 1), rows[ids])


def test_many_messages_in_few_frames_are_answered_in_order(
    grpc_peer: MakePeer, rows: np.ndarray
) -> None:
    """Checks that a stream's 500 messages in few frames have their responses in order."""
    peer = grpc_peer()
    body = b"".join(f.message(embed_request([i % 500])) for i in range(500))
    peer.send(f.headers(1, f.grpc_head(b"EmbedStream"), end=False) + f.data(1, body))
    response = peer.response(1)
    assert response.grpc_status == 0
    responses = map(pb.EmbedResponse.FromString, unframed(response.body))
    values = [np.frombuffer(one.values, "<f4") for one in responses]
    np.testing.assert_array_equal(np.stack(values), rows[np.arange(500) % 500])


def test_body_for_an_unknown_method_does_no_harm(grpc_peer: MakePeer, rows: np.ndarray) -> None:
    """Checks that an unknown method gets its response before its body, and that the rest of the
    body does no harm.
    """
    peer = grpc_peer()
    opened = f.headers(1, f.grpc_head(b"Nothing"), end=False)
    peer.send(opened + f.data(1, bytes(100), end=False))
    check_rejected(peer.response(1), UNIMPLEMENTED)
    for _ in range(50):
        peer.send(f.data(1, bytes(10_000), end=False))
    check_usable(peer, 3, rows)


def test_long_model_name_is_truncated_in_the_error_message(
    grpc_peer: MakePeer, rows: np.ndarray
) -> None:
    """Checks that a model name of 1 MB is rejected, and is not sent back whole in a header."""
    peer = grpc_peer()
    request = pb.EmbedRequest(model="\u00e9%\n" * 100_000, keys=["user"], ids=[1], lengths=[1])
    response = send_call(peer, 1, f.message(request.SerializeToString()))
    check_rejected(response, NOT_FOUND, INVALID_ARGUMENT)
    assert len(unquote_to_bytes(response.grpc_message)) <= 2000
    check_usable(peer, 3, rows)


@pytest.mark.growth(64 << 10)
def test_incomplete_messages_do_not_block_other_calls(
    grpc_peer: MakePeer, rows: np.ndarray
) -> None:
    """Opens 16 calls on each of 4 connections; half of each promised message arrives."""
    for _ in range(4):
        peer = grpc_peer()
        for stream in range(1, 33, 2):
            opened = f.headers(stream, f.grpc_head(b"Embed"), end=False)
            peer.send(opened + f.data(stream, prefix(BODY_BYTES_MAX) + bytes(60_000), end=False))
        peer.pong()
        check_usable(peer, 33, rows)


@pytest.mark.growth(128 << 10)
def test_unread_stream_responses_stop_the_reading_of_messages(grpc_peer: MakePeer) -> None:
    """Sends an endless EmbedStream and opens no window: the server stops taking messages."""
    peer = grpc_peer(greeting=f.PREFACE + f.settings((f.INITIAL_WINDOW_SIZE, 0)))
    peer.send(f.headers(1, f.grpc_head(b"EmbedStream"), end=False))
    frame = f.data(1, f.message(LARGE_CALL), end=False)
    window_bytes = STREAM_WINDOW
    for _ in range(300):
        if peer.goaway_code is not None or peer.is_closed or window_bytes < len(frame):
            break
        peer.send(frame)
        window_bytes -= len(f.message(LARGE_CALL))
        peer.read_for(0.005)
        window_bytes += sum(
            increment_of(one) for one in peer.of_type(f.WINDOW_UPDATE) if one.stream == 1
        )
        peer.others.clear()
    else:
        pytest.fail("300 messages were taken whose answers, 300 MiB, nobody takes")


def increment_of(update: f.Frame) -> int:
    return int.from_bytes(update.payload, "big")
