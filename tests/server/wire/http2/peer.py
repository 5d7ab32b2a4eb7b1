"""A client of an Http2Connection without sockets, which sends and receives hyperframe's frames."""

from collections.abc import Iterable
from typing import TypeVar

from hpack import Decoder, Encoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from embedserve.wire.http2.connection import Http2Connection
from embedserve.wire.http2.frames import ErrorCode
from embedserve.wire.http2.header_blocks import encode
from embedserve.wire.http2.request_headers import ResolvedRoute, ResolveRoute, read_request
from embedserve.wire.http2.stream import Stream
from embedserve.wire.http2.upload_budget import UploadBudget
from embedserve.wire.http_stream import Handler, Headers
from embedserve.wire.response_date import ResponseDate
from embedserve.wire.wire_server import UPLOAD_BYTES_MAX

F = TypeVar("F", bound=Frame)
POST: Headers = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/"),
    (b":authority", b"h"),
]
OK, TAIL = encode([(b":status", b"200")]), encode([(b"grpc-status", b"0")])
"""Header blocks of a response, and of its trailers."""


class RecordingHandler(Handler):
    """Records the events of its stream; consumes the received bytes, unless it ``holds_bodies``."""

    def __init__(self, stream: Stream, *, holds_bodies: bool = False) -> None:
        self.stream = stream
        self.holds_bodies = holds_bodies
        self.body = b""
        self.chunk_sizes: list[int] = []  # bytes of each chunk that it received
        self.is_complete = False
        self.resets = self.resumes = self.drains = self.checks = 0

    def receive(self, data: bytes, is_end: bool) -> None:
        assert not self.is_complete
        self.body += data
        self.chunk_sizes.append(len(data))
        self.is_complete = is_end
        if not self.holds_bodies:
            self.stream.consumed(self.stream.held_bytes)

    def reset(self) -> None:
        self.resets += 1

    def resume(self) -> None:
        self.resumes += 1

    def check_time(self, now_s: float) -> None:
        self.checks += 1

    def drain(self) -> None:
        self.drains += 1


class Peer:
    """A client and its connection.

    Attributes:
        handlers: handlers of the streams so far, by stream id.
        holds_bodies: whether new handlers hold the received bytes.
        seen: all frames from the connection.
    """

    def __init__(
        self,
        open_request: ResolveRoute | None = None,
        uploads: UploadBudget | None = None,
        *,
        settings: dict[int, int] | None = None,
        is_begun: bool = True,
    ) -> None:
        self.handlers: dict[int, RecordingHandler] = {}
        self.holds_bodies = False
        self.outputs = 0
        self.connection = Http2Connection(
            open_request or self._open_request,
            uploads or UploadBudget(UPLOAD_BYTES_MAX, lambda: True),
            self._on_output,
            ResponseDate(),
        )
        self.encoder = Encoder()
        self.decoder = Decoder()
        self.seen: list[Frame] = []
        self.initial_frames = self.take()
        if is_begun:
            self.send(SettingsFrame(0, settings or {}))

    def _on_output(self) -> None:
        self.outputs += 1

    def _open_request(self, headers: Headers) -> ResolvedRoute | str:
        request = read_request(headers)
        if isinstance(request, str):
            return request
        return ResolvedRoute(self._open, request.content_length)

    def _open(self, stream: Stream) -> Handler:
        self.handlers[stream.id] = RecordingHandler(stream, holds_bodies=self.holds_bodies)
        return self.handlers[stream.id]

    def send(self, *sent: Frame | bytes) -> list[Frame]:
        """Passes frames or bytes to the connection in one chunk; returns the frames that it
        sends.
        """
        data = b"".join(one if isinstance(one, bytes) else one.serialize() for one in sent)
        self.connection.receive(data)
        while self.connection.has_more:
            self.connection.receive(b"")
        return self.take()

    def take(self) -> list[Frame]:
        """Returns the frames to send, as the transport would write them."""
        sender = self.connection.frame_writer
        data = bytearray()
        while True:
            if sender.ready:
                sender.pump()
            if not sender.out:
                break
            data += b"".join(sender.out)
            sender.out.clear()
        sender.detach_small_bodies()
        found = list(frames_of(bytes(data)))
        self.seen += found
        return found

    def headers(
        self,
        stream_id: int = 1,
        headers: Headers = POST,
        *,
        is_end: bool = True,
        flags: Iterable[str] = (),
    ) -> HeadersFrame:
        """Returns a HEADERS frame; with ``is_end`` it is the whole request."""
        frame = HeadersFrame(stream_id, self.encoder.encode(headers))
        frame.flags.add("END_HEADERS")
        if is_end:
            frame.flags.add("END_STREAM")
        for flag in flags:
            frame.flags.add(flag)
        return frame

    def open(self, stream_id: int = 1, *, is_end: bool = True) -> RecordingHandler:
        """Opens a stream; returns its handler."""
        received = self.send(self.headers(stream_id, is_end=is_end))
        assert not of(received, RstStreamFrame, GoAwayFrame), received
        return self.handlers[stream_id]

    def respond(self, stream_id: int, body: bytes = b"") -> list[Frame]:
        """Sends the response to an open stream; returns the frames to send."""
        self.handlers[stream_id].stream.send_response(OK, (body,), len(body), b"")
        return self.take()

    def response_headers(self, frame: Frame) -> Headers:
        """Decodes a received HEADERS frame. The caller passes each frame once, in order."""
        assert isinstance(frame, HeadersFrame)
        return list(self.decoder.decode(frame.data, raw=True))


def data(
    stream_id: int, body: bytes, *, is_end: bool = False, padding: int | None = None
) -> DataFrame:
    frame = DataFrame(stream_id, body)
    if is_end:
        frame.flags.add("END_STREAM")
    if padding is not None:
        frame.flags.add("PADDED")
        frame.pad_length = padding
    return frame


def update(stream_id: int, increment: int) -> WindowUpdateFrame:
    return WindowUpdateFrame(stream_id, increment)


def continuation(stream_id: int, block: bytes, *, is_end: bool = True) -> ContinuationFrame:
    frame = ContinuationFrame(stream_id, block)
    if is_end:
        frame.flags.add("END_HEADERS")
    return frame


def raw(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    """Returns a frame of any type and content."""
    head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big")
    return head + payload


def frames_of(sent: bytes) -> Iterable[Frame]:
    while sent:
        frame, length = Frame.parse_frame_header(memoryview(sent)[:9])
        assert len(sent) >= 9 + length, "a frame is cut off"
        frame.parse_body(memoryview(sent)[9 : 9 + length])
        yield frame
        sent = sent[9 + length :]


def of(frames: Iterable[Frame], *kinds: type[F]) -> list[F]:
    return [frame for frame in frames if isinstance(frame, kinds)]


def body_of(frames: Iterable[Frame], stream_id: int) -> bytes:
    return b"".join(one.data for one in of(frames, DataFrame) if one.stream_id == stream_id)


def has_ended(frames: Iterable[Frame], stream_id: int) -> bool:
    return any(one.stream_id == stream_id and "END_STREAM" in one.flags for one in frames)


def resets(frames: Iterable[Frame]) -> list[tuple[int, ErrorCode]]:
    """Returns the (stream, code) of each RST_STREAM."""
    return [(one.stream_id, ErrorCode(one.error_code)) for one in of(frames, RstStreamFrame)]


def assert_connection_error(peer: Peer, received: list[Frame], code: ErrorCode) -> GoAwayFrame:
    """Checks that the connection ended with ``code``, and with GOAWAY as its last frame."""
    last = received[-1]
    assert isinstance(last, GoAwayFrame), received
    assert ErrorCode(last.error_code) is code, last
    assert peer.connection.is_over
    assert peer.connection.streams == {}
    return last
