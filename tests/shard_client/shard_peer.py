"""A shard without sockets that writes frames by hand, and the client under test."""

from collections.abc import Sequence
from typing import TypeVar

from hpack import Decoder
from hyperframe.frame import Frame, HeadersFrame
from server.wire.http2.peer import frames_of

from embedserve.shard_client.client_stream import ClientStream
from embedserve.shard_client.http2_client import Http2Client
from embedserve.shard_client.reply import Reply
from embedserve.wire.grpc.grpc_framing import framed
from embedserve.wire.http2 import frames
from embedserve.wire.http2.frames import DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE
from embedserve.wire.http2.header_blocks import encode
from embedserve.wire.http_stream import Headers

F = TypeVar("F", bound=Frame)
BLOCK = encode([(b":method", b"POST"), (b":path", b"/")])
RESPONSE_HEADERS: Headers = [(b":status", b"200"), (b"content-type", b"application/grpc")]
OK_TRAILERS: Headers = [(b"grpc-status", b"0")]
LIMIT = 100_000


class ShardPeer:
    """A client, its replies, and the frames that it sends.

    Attributes:
        replies: replies so far, by the number of the call.
    """

    def __init__(self, *settings: tuple[int, int], is_begun: bool = True) -> None:
        self.sent = bytearray()
        self.replies: dict[int, Reply] = {}
        self.changes: list[tuple[bool, bool, bool]] = []
        self.calls = 0
        self.client = Http2Client(self._write, LIMIT, self._on_change)
        self.decoder = Decoder()
        assert self.sent.startswith(PREFACE)
        del self.sent[: len(PREFACE)]
        self.first = self.take_frames()
        if is_begun:
            self.send(frames.settings(*settings))
            self.take_frames()

    def _write(self, data: bytes) -> None:
        self.sent += data

    def _on_change(self) -> None:
        client = self.client
        self.changes.append((client.is_begun, client.is_draining, client.is_closed))

    def call(self, *message: bytes, block: bytes = BLOCK) -> ClientStream:
        number = self.calls
        self.calls += 1

        def on_reply(reply: Reply) -> None:
            assert number not in self.replies
            self.replies[number] = reply

        return self.client.call(block, message, on_reply)

    def send(self, *parts: bytes) -> list[Frame]:
        """Passes ``parts`` to the client, and returns the frames that it sends."""
        self.client.receive(b"".join(parts))
        return self.take_frames()

    def take_frames(self) -> list[Frame]:
        sent, self.sent = bytes(self.sent), bytearray()
        return list(frames_of(sent))


def only(found: Sequence[Frame], kind: type[F]) -> list[F]:
    return [frame for frame in found if isinstance(frame, kind)]


def headers_of(peer: ShardPeer, frame: Frame) -> Headers:
    assert isinstance(frame, HeadersFrame)
    return list(peer.decoder.decode(frame.data, raw=True))


def headers(stream_id: int, fields: Headers, flags: int = END_HEADERS) -> bytes:
    block = encode(fields)
    return frames.frame_header(len(block), HEADERS, flags, stream_id) + block


def data(stream_id: int, payload: bytes, flags: int = 0) -> bytes:
    return frames.frame_header(len(payload), DATA, flags, stream_id) + payload


def trailers(stream_id: int, fields: Headers = OK_TRAILERS) -> bytes:
    return headers(stream_id, fields, END_HEADERS | END_STREAM)


def response_frames(stream_id: int, message: bytes, frame_bytes: int = 16384) -> bytes:
    """Returns a complete response in DATA frames of ``frame_bytes``."""
    body = framed(message)
    chunks = [body[start : start + frame_bytes] for start in range(0, len(body), frame_bytes)]
    sent = [data(stream_id, chunk) for chunk in chunks]
    return b"".join((headers(stream_id, RESPONSE_HEADERS), *sent, trailers(stream_id)))
