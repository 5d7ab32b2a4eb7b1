"""Tests of gRPC calls from bytes to bytes, without sockets: messages, statuses, invalid input."""

import gzip
from itertools import pairwise
from time import perf_counter

import pytest
from hyperframe.frame import DataFrame, HeadersFrame
from server.fake_engine import FakeEngine
from server.pipelines import outcomes_of
from server.wire.grpc.grpc_peer import (
    BODY_MAX,
    CHECK,
    EMBED,
    MESSAGE,
    STREAM,
    GrpcPeer,
    framed_compressed,
    outcomes,
    request_headers,
    vector,
)
from server.wire.http2.peer import data, of, resets

from embedserve.pipeline import UPLOAD_S_MAX
from embedserve.wire.grpc.grpc_framing import framed
from embedserve.wire.grpc.service import SERVICE_NAME
from embedserve.wire.http2.frames import ErrorCode
from embedserve_proto import embedding_pb2 as pb


@pytest.mark.parametrize("ends", [[], [1], [4], [5], [6], [3, 9]])
async def test_message_split_into_chunks_is_answered(
    peer: GrpcPeer, engine: FakeEngine, ends: list[int]
) -> None:
    body = framed(MESSAGE)
    bounds = [0, *ends, len(body)]
    peer.call(1, EMBED, *(body[a:b] for a, b in pairwise(bounds)))
    await peer.wait_for_end(1)
    (response,) = peer.messages(1)
    assert vector(response) == engine.tables["t_user"][1].tolist()
    assert peer.status(1) == (0, "")
    first = peer.seen[2] if isinstance(peer.seen[2], HeadersFrame) else None
    assert first is None or "END_STREAM" not in first.flags
    assert outcomes(peer) == {"OK": 1}


async def test_end_of_stream_may_arrive_in_an_empty_frame(peer: GrpcPeer) -> None:
    peer.call(1, EMBED, framed(MESSAGE), b"")
    await peer.wait_for_end(1)
    assert peer.status(1) == (0, "")


OUTCOME_OF = {
    3: "INVALID_ARGUMENT",
    8: "RESOURCE_EXHAUSTED",
    12: "UNIMPLEMENTED",
    13: "INVALID_ARGUMENT",
}


@pytest.mark.parametrize(
    ("body", "code", "error_message"),
    [
        (b"", 12, "exactly one message: none came"),
        (framed(MESSAGE) * 2, 12, "exactly one message: more came"),
        (framed(MESSAGE)[:-1], 13, "ended within a message"),
        (b"\0\0\0", 13, "ended within a message"),
        (framed(MESSAGE) + b"\0", 12, "exactly one message"),
        (framed(b"") * 100, 12, "exactly one message: more came"),
        (b"\1" + framed(MESSAGE)[1:], 13, "compressed"),
        (b"\0" + (BODY_MAX + 1).to_bytes(4, "big"), 8, "has 300001 bytes, the limit is 300000"),
        (framed(b"\xff"), 3, "body is not an EmbedRequest"),
    ],
)
async def test_body_other_than_one_valid_message_is_rejected(
    peer: GrpcPeer, body: bytes, code: int, error_message: str
) -> None:
    peer.call(1, EMBED, body)
    assert peer.status(1)[0] == code
    assert error_message in peer.status(1)[1]
    assert peer.trailers[1][b":status"] == b"200"
    assert peer.trailers[1][b"content-type"] == b"application/grpc"
    assert of(peer.seen, DataFrame) == []
    assert outcomes(peer) == {OUTCOME_OF[code]: 1}


async def test_message_over_the_limit_is_rejected_before_it_arrives(peer: GrpcPeer) -> None:
    peer.call(1, EMBED, b"\0" + (BODY_MAX + 1).to_bytes(4, "big") + b"x", is_end=False)
    assert peer.status(1)[0] == 8
    frames = [*peer.send(data(1, bytes(16384))), *peer.send(data(1, b"x"))]
    assert resets(frames) == [(1, ErrorCode.NO_ERROR)]


@pytest.mark.parametrize("path", [EMBED, CHECK])
@pytest.mark.parametrize("rest", [b"\0", framed(MESSAGE)])
async def test_bytes_behind_the_message_are_rejected_before_the_request_ends(
    peer: GrpcPeer, path: str, rest: bytes
) -> None:
    peer.call(1, path, framed(b""), rest, is_end=False)
    assert peer.status(1) == (12, "the method requires exactly one message: more came")


async def test_window_is_enlarged_for_a_large_message(peer: GrpcPeer) -> None:
    size = 290_000
    message = pb.EmbedRequest(keys=["user"], lengths=[0] * size).SerializeToString()
    body = framed(message[: size - 5] if len(message) > size else message)
    peer.call(1, EMBED, is_end=False)
    stream = peer.connection.streams[1]
    for start in range(0, len(body), 16384):
        chunk = body[start : start + 16384]
        assert stream.receive_window >= len(chunk)
        peer.send(data(1, chunk, is_end=start + 16384 >= len(body)))
    await peer.wait_for_end(1)
    assert not peer.connection.is_over
    assert resets(peer.seen) == []


@pytest.mark.parametrize(("encoding", "code"), [(b"gzip", 0), (b"identity", 0), (b"br", 12)])
async def test_supported_encodings_are_accepted_and_unknown_encodings_rejected(
    peer: GrpcPeer, encoding: bytes, code: int
) -> None:
    is_packed = encoding == b"gzip"
    body = framed_compressed(gzip.compress(MESSAGE)) if is_packed else framed(MESSAGE)
    peer.call(1, EMBED, body, more=[(b"grpc-encoding", encoding)])
    await peer.wait_for_end(1)
    assert peer.status(1)[0] == code
    if code:
        assert "'br'" in peer.status(1)[1]
        assert peer.trailers[1][b"grpc-accept-encoding"] == b"identity,deflate,gzip"


@pytest.mark.parametrize(
    "path",
    ["/", "//", "/embed", f"{EMBED}/", f"/{SERVICE_NAME}", f"/{SERVICE_NAME}/Nothing"]
    + ["/embedserve.v1.Nothing/Embed", "/" + "a" * 1000],
)
async def test_an_unknown_method_is_unimplemented(peer: GrpcPeer, path: str) -> None:
    peer.call(1, path, framed(MESSAGE))
    assert peer.status(1) == (12, f"there is no method {path}")
    assert outcomes_of(peer.pipeline.metrics.protocols["grpc"]) == {"UNIMPLEMENTED": 1}


@pytest.mark.parametrize("content_type", [b"application/grpc+proto", b"application/grpc;x=1"])
async def test_grpc_content_type_variants_are_accepted(peer: GrpcPeer, content_type: bytes) -> None:
    frame = peer.headers(1, request_headers(EMBED, content_type=content_type), is_end=False)
    peer.send(frame, data(1, framed(MESSAGE), is_end=True))
    await peer.wait_for_end(1)
    assert peer.status(1) == (0, "")


@pytest.mark.parametrize("value", [b"5", b"-1S", b"1x", b"123456789S"])
async def test_malformed_timeout_is_rejected(peer: GrpcPeer, value: bytes) -> None:
    peer.call(1, EMBED, framed(MESSAGE), more=[(b"grpc-timeout", value)])
    assert peer.status(1) == (13, f"grpc-timeout is {value.decode()!r}")
    assert outcomes(peer) == {"INVALID_ARGUMENT": 1}


@pytest.mark.parametrize("name", [b"x-routing-key", b"grpc-timeout", b"grpc-encoding"])
@pytest.mark.parametrize("path", [EMBED, STREAM])
async def test_repeated_single_value_header_is_rejected(
    peer: GrpcPeer, engine: FakeEngine, path: str, name: bytes
) -> None:
    """Checks the rule of HTTP/1 and HTTP/2: of two values, each end could read another."""
    peer.call(1, path, framed(MESSAGE), more=[(name, b"1S"), (name, b"2S")])
    shown = name.decode().title()
    assert peer.status(1) == (3, f"there are several {shown} headers, expected one")
    assert peer.trailers[1][b"embedserve-field"] == shown.encode()
    assert engine.lookups == []


async def test_header_list_over_the_limit_is_rejected(peer: GrpcPeer) -> None:
    peer.call(1, EMBED, framed(MESSAGE), more=[(b"x", b"a" * 3000)] * 6)
    assert peer.status(1)[0] == 8
    assert "the headers have" in peer.status(1)[1]


@pytest.mark.parametrize("path", [EMBED, STREAM])
async def test_incomplete_request_is_rejected_after_the_timeout(peer: GrpcPeer, path: str) -> None:
    peer.call(1, path, framed(MESSAGE)[:3], is_end=False)
    peer.connection.check_time(perf_counter() + UPLOAD_S_MAX - 1)
    assert peer.take() == []
    peer.connection.check_time(perf_counter() + UPLOAD_S_MAX + 1)
    peer.take()
    for seconds in (2, 3):
        peer.connection.check_time(perf_counter() + UPLOAD_S_MAX + seconds)
    assert resets(peer.take()) == [(1, ErrorCode.NO_ERROR)]
    assert peer.status(1) == (4, "the request was incomplete after 30 s")
    assert outcomes(peer) == {"DEADLINE_EXCEEDED": 1}
