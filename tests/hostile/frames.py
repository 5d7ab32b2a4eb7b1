"""Builders of the bytes of HTTP/2 frames, valid and invalid; RFC 9113 and RFC 7541.

The functions keep no state and check no argument. Header blocks are literals, which need no dynamic
table.
"""

import struct
from collections.abc import Iterable
from typing import NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_BYTES_MAX = 16_384
WINDOW_MAX = 2**31 - 1

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY = range(8)
WINDOW_UPDATE, CONTINUATION = 8, 9
UNKNOWN_TYPE = 0x42

ACK = END_STREAM = 0x1
END_HEADERS = 0x4
PADDED = 0x8
WITH_PRIORITY = 0x20

NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR, SETTINGS_TIMEOUT = range(5)
STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR = range(5, 10)
CONNECT_ERROR, ENHANCE_YOUR_CALM = 10, 11

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE = range(1, 5)
MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 5, 6

Header = tuple[bytes, bytes]


class Frame(NamedTuple):
    """A frame that was received."""

    type: int
    flags: int
    stream: int
    payload: bytes

    @property
    def ends_stream(self) -> bool:
        return self.type in (DATA, HEADERS) and bool(self.flags & END_STREAM)


def frame(type_: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    length = len(payload)
    return struct.pack(">BHBBL", length >> 16, length & 0xFFFF, type_, flags, stream) + payload


def take_frames(buffer: bytearray) -> list[Frame]:
    """Removes the whole frames at the start of ``buffer``, and returns them."""
    frames, start = [], 0
    while len(buffer) - start >= 9:
        high, low, type_, flags, stream = struct.unpack_from(">BHBBL", buffer, start)
        end = start + 9 + (high << 16 | low)
        if end > len(buffer):
            break
        frames.append(Frame(type_, flags, stream & WINDOW_MAX, bytes(buffer[start + 9 : end])))
        start = end
    del buffer[:start]
    return frames


def settings(*pairs: tuple[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HL", *pair) for pair in pairs))


def settings_ack() -> bytes:
    return frame(SETTINGS, ACK, 0)


def window_update(stream: int, nbytes: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">L", nbytes))


def rst_stream(stream: int, code: int = CANCEL) -> bytes:
    return frame(RST_STREAM, 0, stream, struct.pack(">L", code))


def goaway(code: int = NO_ERROR, last_stream: int = 0) -> bytes:
    return frame(GOAWAY, 0, 0, struct.pack(">LL", last_stream, code))


def ping(number: int = 0) -> bytes:
    return frame(PING, 0, 0, struct.pack(">Q", number))


def data(stream: int, payload: bytes = b"", end: bool = True) -> bytes:
    """Returns DATA frames of ``payload``, none larger than a peer must accept."""
    chunks = [
        payload[i : i + FRAME_BYTES_MAX] for i in range(0, len(payload), FRAME_BYTES_MAX)
    ] or [b""]
    last = len(chunks) - 1
    return b"".join(
        frame(DATA, END_STREAM if end and i == last else 0, stream, chunk)
        for i, chunk in enumerate(chunks)
    )


def headers(stream: int, block: bytes, end: bool = True) -> bytes:
    """Returns a HEADERS frame, with CONTINUATION frames if ``block`` needs them."""
    first, rest = block[:FRAME_BYTES_MAX], block[FRAME_BYTES_MAX:]
    ends_stream = END_STREAM if end else 0
    if not rest:
        return frame(HEADERS, END_HEADERS | ends_stream, stream, first)
    parts = [frame(HEADERS, ends_stream, stream, first)]
    while rest:
        part, rest = rest[:FRAME_BYTES_MAX], rest[FRAME_BYTES_MAX:]
        parts.append(frame(CONTINUATION, 0 if rest else END_HEADERS, stream, part))
    return b"".join(parts)


def integer(value: int, prefix_bits: int, first: int = 0) -> bytes:
    """Encodes ``value`` as an HPACK integer; ``first`` holds the bits before the prefix."""
    most = (1 << prefix_bits) - 1
    if value < most:
        return bytes([first | value])
    encoded = bytearray([first | most])
    value -= most
    while value >= 128:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def string(value: bytes) -> bytes:
    return integer(len(value), 7) + value


def literal(name: bytes, value: bytes, first: int = 0x00) -> bytes:
    """Encodes a field with a literal name; ``first`` 0x40 adds it to the dynamic table."""
    return bytes([first]) + string(name) + string(value)


def block(fields: Iterable[Header]) -> bytes:
    return b"".join(literal(name, value) for name, value in fields)


def head(method: bytes, path: bytes, *more: Header) -> bytes:
    """Returns the header block of a request."""
    pseudo = [(b":method", method), (b":scheme", b"http"), (b":path", path)]
    return block([*pseudo, (b":authority", b"test"), *more])


def get(stream: int, path: bytes = b"/health/live", *more: Header) -> bytes:
    return headers(stream, head(b"GET", path, *more))


GRPC = ((b"content-type", b"application/grpc"), (b"te", b"trailers"))


def grpc_head(method: bytes, *more: Header) -> bytes:
    """Returns the header block of a call; ``method`` is a name like b"Embed", or a whole path."""
    path = method if method[:1] == b"/" else b"/embedserve.v1.EmbeddingService/" + method
    return head(b"POST", path, *GRPC, *more)


def message(payload: bytes, is_compressed: bool = False) -> bytes:
    """Returns ``payload`` with gRPC's length prefix."""
    return struct.pack(">?L", is_compressed, len(payload)) + payload


def call(stream: int, payload: bytes, method: bytes = b"Embed", *more: Header) -> bytes:
    """Returns the frames of a whole unary call."""
    opened = headers(stream, grpc_head(method, *more), end=False)
    return opened + data(stream, message(payload))
