"""Tests of gRPC calls from bytes to bytes, without sockets: messages, statuses, invalid input."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from time import perf_counter
from urllib.parse import unquote

import numpy as np
import pytest
from grpc_health.v1 import health_pb2
from hyperframe.frame import DataFrame, Frame, HeadersFrame
from server.codecs import PROTOBUF
from server.fake_engine import FakeEngine
from server.live import make_pipeline
from server.pipelines import outcomes_of
from server.waiting import until
from server.wire.http2.peer import Peer, body_of, data, has_ended, of, resets, update

from embedserve.api.management import management_app
from embedserve.config import Limits
from embedserve.errors import DRAINING
from embedserve.pipeline import UPLOAD_S_MAX, RequestOptions, RequestPipeline
from embedserve.wire.grpc.calls import BidiCall
from embedserve.wire.grpc.embed_stream import DRAIN_STREAM_S, EmbedStream
from embedserve.wire.grpc.grpc_framing import framed
from embedserve.wire.grpc.service import SERVICE_NAME, GrpcService
from embedserve.wire.http2.frames import ErrorCode
from embedserve.wire.http2.request_headers import ResolvedRoute
from embedserve.wire.http_stream import Headers
from embedserve.wire.router import Router
from embedserve_proto import embedding_pb2 as pb

EMBED = f"/{SERVICE_NAME}/Embed"
STREAM = f"/{SERVICE_NAME}/EmbedStream"
MESSAGE = pb.EmbedRequest(keys=["user"], ids=[1], lengths=[1]).SerializeToString()
BODY_MAX = 300_000


def head(
    path: str, *more: tuple[bytes, bytes], content_type: bytes = b"application/grpc"
) -> Headers:
    return [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path.encode()),
        (b":authority", b"h"),
        (b"content-type", content_type),
        (b"te", b"trailers"),
        *more,
    ]


class GrpcPeer(Peer):
    """A client of a connection over a pipeline, and the trailers of its calls."""

    def __init__(self, pipeline: RequestPipeline) -> None:
        router = Router(pipeline, management_app(pipeline), GrpcService(pipeline))
        super().__init__(router.resolve_http2)
        self.pipeline = pipeline
        self.ends: dict[int, dict[bytes, bytes]] = {}

    def take(self) -> list[Frame]:
        frames = super().take()
        for frame in of(frames, HeadersFrame):
            headers = dict(self.answer_headers(frame))
            if "END_STREAM" in frame.flags:
                self.ends[frame.stream_id] = headers
        return frames

    def call(self, stream_id: int, path: str, *pieces: bytes, more: Headers | None = None) -> None:
        """Sends a request whose body comes in ``pieces``."""
        frames = [data(stream_id, piece) for piece in pieces]
        if frames:
            frames[-1].flags.add("END_STREAM")
        self.send(self.headers(stream_id, head(path, *(more or [])), is_end=not pieces), *frames)

    def status(self, stream_id: int) -> tuple[int, str]:
        """Returns the (code, message) that a call ended with."""
        end = self.ends[stream_id]
        return int(end[b"grpc-status"]), unquote(end.get(b"grpc-message", b"").decode())

    def messages(self, stream_id: int) -> list[bytes]:
        """Returns the response messages of the call so far."""
        body, found = body_of(self.seen, stream_id), []
        while body:
            size = int.from_bytes(body[1:5], "big")
            assert (body[0], len(body) >= 5 + size) == (0, True)
            found.append(body[5 : 5 + size])
            body = body[5 + size :]
        return found

    async def ended(self, stream_id: int) -> None:
        def has_ended() -> bool:
            self.take()
            return stream_id in self.ends

        await until(has_ended)


@pytest.fixture
def pipeline(engine: FakeEngine, executor: ThreadPoolExecutor) -> RequestPipeline:
    limits = Limits(body_bytes_max=BODY_MAX, inline_bytes_max=0)
    return make_pipeline(engine, executor=executor, limits=limits)


@pytest.fixture
async def peer(pipeline: RequestPipeline) -> GrpcPeer:
    return GrpcPeer(pipeline)


@pytest.fixture
def held(engine: FakeEngine) -> Iterator[FakeEngine]:
    engine.hold()
    yield engine
    engine.release()


def outcomes(peer: GrpcPeer) -> dict[str, int]:
    return dict(outcomes_of(peer.pipeline.metrics.protocols["grpc"]))


def vector(message: bytes) -> list[float]:
    answer = pb.EmbedResponse.FromString(message)
    values: list[float] = np.frombuffer(answer.values, "<f4")[:4].tolist()
    return values


@pytest.mark.parametrize("ends", [[], [1], [4], [5], [6], [3, 9]])
async def test_a_message_may_come_in_any_pieces(
    peer: GrpcPeer, engine: FakeEngine, ends: list[int]
) -> None:
    body = framed(MESSAGE)
    bounds = [0, *ends, len(body)]
    peer.call(1, EMBED, *(body[a:b] for a, b in pairwise(bounds)))
    await peer.ended(1)
    (answer,) = peer.messages(1)
    assert vector(answer) == engine.tables["t_user"][1].tolist()
    assert peer.status(1) == (0, "")
    first = peer.seen[2] if isinstance(peer.seen[2], HeadersFrame) else None
    assert first is None or "END_STREAM" not in first.flags
    assert outcomes(peer) == {"OK": 1}


async def test_the_end_may_come_alone(peer: GrpcPeer) -> None:
    peer.call(1, EMBED, framed(MESSAGE), b"")
    await peer.ended(1)
    assert peer.status(1) == (0, "")


OUTCOME_OF = {3: "INVALID_ARGUMENT", 8: "RESOURCE_EXHAUSTED", 12: "UNIMPLEMENTED", 13: "INTERNAL"}


@pytest.mark.parametrize(
    ("body", "code", "said"),
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
async def test_a_body_that_is_not_one_message_is_refused(
    peer: GrpcPeer, body: bytes, code: int, said: str
) -> None:
    peer.call(1, EMBED, body)
    assert peer.status(1)[0] == code
    assert said in peer.status(1)[1]
    assert peer.ends[1][b":status"] == b"200"
    assert peer.ends[1][b"content-type"] == b"application/grpc"
    assert of(peer.seen, DataFrame) == []
    assert outcomes(peer) == {OUTCOME_OF[code]: 1}


async def test_what_is_too_large_is_refused_before_it_comes(peer: GrpcPeer) -> None:
    peer.send(peer.headers(1, head(EMBED), is_end=False))
    peer.send(data(1, b"\0" + (BODY_MAX + 1).to_bytes(4, "big") + b"x"))
    assert peer.status(1)[0] == 8
    answered = [*peer.send(data(1, bytes(16384))), *peer.send(data(1, b"x"))]
    assert resets(answered) == [(1, ErrorCode.NO_ERROR)]


async def test_a_message_larger_than_the_window_is_asked_for(peer: GrpcPeer) -> None:
    size = 290_000
    message = pb.EmbedRequest(keys=["user"], lengths=[0] * size).SerializeToString()
    body = framed(message[: size - 5] if len(message) > size else message)
    peer.send(peer.headers(1, head(EMBED), is_end=False))
    stream = peer.connection.streams[1]
    for start in range(0, len(body), 16384):
        piece = body[start : start + 16384]
        assert stream.receive_window >= len(piece)
        peer.send(data(1, piece, is_end=start + 16384 >= len(body)))
    await peer.ended(1)
    assert not peer.connection.is_over
    assert resets(peer.seen) == []


@pytest.mark.parametrize(("encoding", "code"), [(b"gzip", 0), (b"identity", 0), (b"br", 12)])
async def test_messages_may_be_compressed(peer: GrpcPeer, encoding: bytes, code: int) -> None:
    body = framed(MESSAGE)
    if encoding == b"gzip":
        packed = gzip.compress(MESSAGE)
        body = b"\1" + len(packed).to_bytes(4, "big") + packed
    peer.call(1, EMBED, body, more=[(b"grpc-encoding", encoding)])
    await peer.ended(1)
    assert peer.status(1)[0] == code
    if code:
        assert peer.ends[1][b"grpc-accept-encoding"] == b"identity,deflate,gzip"


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
async def test_content_types_of_grpc(peer: GrpcPeer, content_type: bytes) -> None:
    frame = peer.headers(1, head(EMBED, content_type=content_type), is_end=False)
    peer.send(frame, data(1, framed(MESSAGE), is_end=True))
    await peer.ended(1)
    assert peer.status(1) == (0, "")


@pytest.mark.parametrize("value", [b"5", b"-1S", b"1x", b"123456789S"])
async def test_a_malformed_timeout_is_refused(peer: GrpcPeer, value: bytes) -> None:
    peer.call(1, EMBED, framed(MESSAGE), more=[(b"grpc-timeout", value)])
    assert peer.status(1) == (13, f"grpc-timeout is {value.decode()!r}")


@pytest.mark.parametrize("name", [b"x-routing-key", b"grpc-timeout", b"grpc-encoding"])
@pytest.mark.parametrize("path", [EMBED, STREAM])
async def test_what_may_be_there_once_is_refused_twice(
    peer: GrpcPeer, engine: FakeEngine, path: str, name: bytes
) -> None:
    """Checks the rule of HTTP/1 and HTTP/2: of two values, each end could read another."""
    peer.call(1, path, framed(MESSAGE), more=[(name, b"1S"), (name, b"2S")])
    shown = name.decode().title()
    assert peer.status(1) == (3, f"there are several {shown} headers, expected one")
    assert engine.lookups == []


async def test_a_list_of_headers_that_is_too_large_is_refused(peer: GrpcPeer) -> None:
    peer.call(1, EMBED, framed(MESSAGE), more=[(b"x", b"a" * 3000)] * 6)
    assert peer.status(1)[0] == 8
    assert "the headers have" in peer.status(1)[1]


async def test_a_request_that_does_not_come_whole_is_refused(peer: GrpcPeer) -> None:
    peer.send(peer.headers(1, head(EMBED), is_end=False), data(1, framed(MESSAGE)[:3]))
    peer.connection.check_time(perf_counter() + UPLOAD_S_MAX - 1)
    assert peer.take() == []
    peer.connection.check_time(perf_counter() + UPLOAD_S_MAX + 1)
    peer.take()
    for seconds in (2, 3):
        peer.connection.check_time(perf_counter() + UPLOAD_S_MAX + seconds)
    assert resets(peer.take()) == [(1, ErrorCode.NO_ERROR)]
    assert peer.status(1) == (4, "the request was incomplete after 30 s")
    assert outcomes(peer) == {"DEADLINE_EXCEEDED": 1}


@pytest.mark.parametrize("rest", [b"\0", b"\0\0\0\0\5ab", b"\2\0\0\0\1a"])
async def test_a_stream_that_breaks_off_ends_with_an_error(peer: GrpcPeer, rest: bytes) -> None:
    peer.call(1, STREAM, framed(MESSAGE) + rest)
    await peer.ended(1)
    assert peer.status(1)[0] == 13


async def test_an_answer_of_a_stream_waits_for_its_window_alone(
    peer: GrpcPeer, engine: FakeEngine
) -> None:
    large = pb.EmbedRequest(keys=["user"], ids=[1] * 3000, lengths=[1] * 3000).SerializeToString()
    peer.send(peer.headers(1, head(STREAM), is_end=False), data(1, framed(large)[:16000]))
    peer.send(data(1, framed(large)[16000:], is_end=True))
    peer.send(update(0, 1 << 20))
    await until(lambda: engine.lookups)
    await until(lambda: len(body_of([*peer.seen, *peer.take()], 1)) >= 65535)
    peer.call(3, EMBED, framed(MESSAGE))
    await peer.ended(3)
    assert peer.status(3) == (0, "")
    assert 1 not in peer.ends
    peer.send(update(1, 1 << 20))
    await peer.ended(1)
    assert pb.EmbedResponse.FromString(peer.messages(1)[0]).batch_size == 3000


async def test_a_drain_answers_what_a_stream_took_and_ends_it(
    peer: GrpcPeer, held: FakeEngine
) -> None:
    peer.send(peer.headers(1, head(STREAM), is_end=False), data(1, framed(MESSAGE)))
    await until(lambda: held.lookups)
    peer.connection.shutdown.start_drain()
    peer.send(data(1, framed(MESSAGE)))  # it was in flight
    peer.connection.check_time(perf_counter() + DRAIN_STREAM_S + 1)
    peer.send(data(1, framed(MESSAGE)))
    assert 1 not in peer.ends
    held.release()
    await peer.ended(1)
    assert len(peer.messages(1)) == 2
    assert peer.status(1) == (14, "draining before the stop")
    assert peer.ends[1][b"retry-after"] == b"1"


CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"


def statuses(peer: GrpcPeer, stream_id: int) -> list[int]:
    found = peer.messages(stream_id)
    return [health_pb2.HealthCheckResponse.FromString(one).status for one in found]


@pytest.mark.parametrize("service", ["", SERVICE_NAME, "grpc.health.v1.Health"])
async def test_health_is_checked(peer: GrpcPeer, service: str) -> None:
    body = framed(health_pb2.HealthCheckRequest(service=service).SerializeToString())
    peer.call(1, CHECK, body)
    peer.pipeline.models.not_ready = DRAINING
    peer.call(3, CHECK, body)
    assert [statuses(peer, number) for number in (1, 3)] == [[1], [2]]


async def test_health_of_an_unknown_service_is_not_found(peer: GrpcPeer) -> None:
    body = framed(health_pb2.HealthCheckRequest(service="nothing").SerializeToString())
    peer.call(1, CHECK, body)
    assert peer.status(1)[0] == 5
    peer.send(peer.headers(3, head(WATCH), is_end=False), data(3, body, is_end=True))
    assert (statuses(peer, 3), 3 in peer.ends) == ([3], False)


async def test_a_change_of_health_is_told_within_a_second(peer: GrpcPeer) -> None:
    peer.call(1, WATCH, framed(health_pb2.HealthCheckRequest().SerializeToString()))
    peer.pipeline.models.not_ready = "tables.safetensors: changed"
    for _ in range(2):
        peer.connection.check_time(perf_counter())
        peer.take()
    assert (statuses(peer, 1), 1 in peer.ends) == ([1, 2], False)


async def test_health_is_watched_until_the_drain(peer: GrpcPeer) -> None:
    body = framed(health_pb2.HealthCheckRequest().SerializeToString())
    peer.call(1, WATCH, body)
    assert (statuses(peer, 1), 1 in peer.ends) == ([1], False)
    peer.pipeline.models.not_ready = DRAINING
    peer.connection.shutdown.start_drain()
    peer.take()
    assert statuses(peer, 1) == [1, 2]
    assert 1 in peer.ends


@pytest.mark.parametrize("path", [CHECK, WATCH])
async def test_bytes_that_are_no_check_are_refused(
    peer: GrpcPeer, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    peer.call(1, path, framed(b"\xff\xff"))
    assert peer.status(1)[0] == 13
    assert "not a HealthCheckRequest" in peer.status(1)[1]
    assert caplog.records == []
    peer.call(3, EMBED, framed(MESSAGE))
    await peer.ended(3)
    assert peer.status(3) == (0, "")


class BrokenStream(BidiCall):
    """Fails at each message."""

    def take(self, message: bytes) -> None:
        raise ZeroDivisionError("secret of the server")


def test_an_unforeseen_error_ends_its_stream_alone(caplog: pytest.LogCaptureFixture) -> None:
    def open_request(headers: Headers) -> ResolvedRoute:
        return ResolvedRoute(lambda stream: BrokenStream(b"identity", {}, stream), None)

    peer = Peer(open_request)
    first, second = (
        peer.send(peer.headers(number, head(STREAM), is_end=False), data(number, framed(b"x")))
        for number in (1, 3)
    )
    assert (resets(first), resets(second)) == ([], [])
    for _ in range(2):
        peer.connection.check_time(perf_counter())
    assert resets(peer.take()) == [(1, ErrorCode.NO_ERROR), (3, ErrorCode.NO_ERROR)]
    end = dict(peer.answer_headers(first[0]))
    assert (end[b"grpc-status"], b"secret" in end[b"grpc-message"]) == (b"13", False)
    assert caplog.text.count("ZeroDivisionError: secret of the server") == 2


async def test_what_a_stream_takes_is_bounded_by_the_bytes_of_its_answers(
    pipeline: RequestPipeline, held: FakeEngine
) -> None:
    metrics = pipeline.metrics.protocols["grpc"]
    asked = RequestOptions("", PROTOBUF, PROTOBUF, None, metrics)
    nbytes = 3 * 36  # a response is 9 float32 values

    def open_request(headers: Headers) -> ResolvedRoute:
        return ResolvedRoute(
            lambda stream: EmbedStream(asked, pipeline, b"identity", {}, stream, nbytes), None
        )

    peer = Peer(open_request)
    count = 20
    peer.send(peer.headers(1, head(STREAM), is_end=False))
    peer.send(data(1, framed(MESSAGE)))
    await until(lambda: held.lookups)
    peer.send(data(1, framed(MESSAGE) * (count - 1), is_end=True))
    assert pipeline.metrics.models["shop"].count_queue()[0] == 2
    held.release()
    # Responses that are not yet written count, too.
    await until(lambda: has_ended([*peer.take(), *peer.seen], 1))
    assert outcomes_of(metrics) == {"OK": count}
    assert sum(lookup.batch_size for lookup in held.lookups) == count
    assert max(lookup.batch_size for lookup in held.lookups) <= 3
