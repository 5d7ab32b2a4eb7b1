"""HTTP/2 frame format: types, flags, settings, error codes, and frame builders.

RFC 9113, sections 4 (frames), 6 (their definitions) and 7 (error codes).
"""

from __future__ import annotations

import struct
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEADER_BYTES = 9
FRAME_HEADER = struct.Struct(">BHBBI")
"""Frame header: the upper 16 and lower 8 bits of the length, type, flags, stream identifier."""
FRAME_BYTES_MAX = 16384
"""Bytes of a frame payload, unless the receiver's settings allow more; the server's never do."""
JOINED_FRAMES_MAX = 4
"""DATA frames of one stream that are read as one. Full frames then fill half of a stream's window,
at which the client gets more window."""
JOINED_FRAME_BYTES_MIN = 1024
"""Payload bytes of a DATA frame that may be joined. Shorter frames, except the last, are read and
charged one by one."""
STREAM_MASK = 0x7FFFFFFF
WINDOW_MAX = 2**31 - 1
WINDOW_AT_START = 65535

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE = range(6)
PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(6, 10)

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

SETTING = struct.Struct(">HI")
"""Entry of a SETTINGS frame: number and value."""
SETTINGS_ENABLE_PUSH = 2
SETTINGS_MAX_CONCURRENT_STREAMS = 3
SETTINGS_INITIAL_WINDOW_SIZE = 4
SETTINGS_MAX_FRAME_SIZE = 5
SETTINGS_MAX_HEADER_LIST_SIZE = 6

SETTINGS_ACK = b"\0\0\0\4\1\0\0\0\0"


class ErrorCode(IntEnum):
    """Error codes of RFC 9113, section 7."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class ProtocolViolation(Exception):
    """A connection error (RFC 9113, section 5.4.1): it ends the connection."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class StreamError(Exception):
    """A stream error (RFC 9113, section 5.4.2): it ends one stream."""

    def __init__(self, stream_id: int, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.stream_id = stream_id
        self.code = code
        self.reason = reason


def violation(reason: str) -> ProtocolViolation:
    """Returns a connection error with code PROTOCOL_ERROR."""
    return ProtocolViolation(ErrorCode.PROTOCOL_ERROR, reason)


def read_settings(flags: int, payload: bytes) -> list[tuple[int, int]]:
    """Returns the number and the value of each setting of a SETTINGS frame; an ACK has none.

    Raises:
        ProtocolViolation: the length is wrong, or a setting cannot have its value.
    """
    if len(payload) % SETTING.size or (flags & ACK and payload):
        raise ProtocolViolation(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of a wrong length")
    settings = list(SETTING.iter_unpack(payload))
    for number, value in settings:
        _check_setting(number, value)
    return settings


def _check_setting(number: int, value: int) -> None:
    """Raises ProtocolViolation for a value that the setting cannot have."""
    if number == SETTINGS_ENABLE_PUSH and value > 1:
        raise violation(f"SETTINGS_ENABLE_PUSH is {value}")
    if number == SETTINGS_INITIAL_WINDOW_SIZE and value > WINDOW_MAX:
        raise ProtocolViolation(
            ErrorCode.FLOW_CONTROL_ERROR, f"SETTINGS_INITIAL_WINDOW_SIZE is {value}"
        )
    if number == SETTINGS_MAX_FRAME_SIZE and not FRAME_BYTES_MAX <= value < 1 << 24:
        raise violation(f"SETTINGS_MAX_FRAME_SIZE is {value}")


def without_padding(payload: bytes, flags: int) -> bytes:
    """Returns the payload of DATA or HEADERS without its padding.

    Raises:
        ProtocolViolation: the padding is at least as long as the payload, or its length is missing.
    """
    if not flags & PADDED:
        return payload
    if not payload:
        raise ProtocolViolation(ErrorCode.FRAME_SIZE_ERROR, "a padded frame without its length")
    padding = payload[0]
    if padding >= len(payload):
        raise violation("padding as long as its frame")
    return payload[1 : len(payload) - padding]


def join_data_frames(data: bytes, start: int, after: int, stream_id: int) -> tuple[bytes, int, int]:
    """Joins consecutive DATA frames of one stream, as a large body arrives.

    The first frame has no flags, and its payload is data[start:after]. Complete DATA frames of the
    same stream right behind it are joined to it.

    Returns:
        joined payload, flags of the last frame, and position where that frame ends.
    """
    view = memoryview(data)
    payloads, last_head, flags = [view[start:after]], len(data) - FRAME_HEADER_BYTES, 0
    while after <= last_head and not flags and len(payloads) < JOINED_FRAMES_MAX:
        upper, lower, kind, more_flags, number = FRAME_HEADER.unpack_from(data, after)
        start = after + FRAME_HEADER_BYTES
        end = start + (upper << 16 | lower)
        if (
            kind != DATA
            or number != stream_id
            or more_flags & ~END_STREAM
            or end > len(data)
            or end - start > FRAME_BYTES_MAX
            or (end - start < JOINED_FRAME_BYTES_MIN and not more_flags)
        ):
            break
        payloads.append(view[start:end])
        after, flags = end, more_flags
    return b"".join(payloads), flags, after


def frame_header(length: int, kind: int, flags: int, stream_id: int) -> bytes:
    return FRAME_HEADER.pack(length >> 16, length & 0xFFFF, kind, flags, stream_id)


def settings(*pairs: tuple[int, int]) -> bytes:
    return frame_header(SETTING.size * len(pairs), SETTINGS, 0, 0) + b"".join(
        SETTING.pack(*pair) for pair in pairs
    )


def window_update(stream_id: int, increment: int) -> bytes:
    return frame_header(4, WINDOW_UPDATE, 0, stream_id) + increment.to_bytes(4, "big")


def rst_stream(stream_id: int, code: int) -> bytes:
    return frame_header(4, RST_STREAM, 0, stream_id) + code.to_bytes(4, "big")


def ping(payload: bytes, flags: int = 0) -> bytes:
    return frame_header(8, PING, flags, 0) + payload


def goaway(last_stream_id: int, code: int, reason: str = "") -> bytes:
    text = reason.encode()
    return (
        frame_header(8 + len(text), GOAWAY, 0, 0) + struct.pack(">II", last_stream_id, code) + text
    )
